"""The limits of the control groups of this process, such as those of a container or a Slurm job: memory and processor time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory(groups: Path = _GROUPS, root: Path = _ROOT) -> float:
    """The bytes that this process and those in its control groups may use; infinity if there is no limit."""
    found = [
        text for folder in _folders("memory", groups, root) for text in _texts(folder, "memory.max", "memory.limit_in_bytes")
    ]
    return min((float(text) for text in found if text.isdigit()), default=float("inf"))


def cores(groups: Path = _GROUPS, root: Path = _ROOT) -> float:
    """The CPU seconds per second that they may use; infinity if there is no limit."""
    shares = [float("inf")]
    for folder in _folders("cpu", groups, root):
        for text in _texts(folder, "cpu.max"):  # quota and period; the quota may be the word max
            shares += [float(quota) / float(period) for quota, period in [text.split()] if quota.isdigit()]
        quotas, periods = _texts(folder, "cpu.cfs_quota_us"), _texts(folder, "cpu.cfs_period_us")
        shares += [float(quota) / float(period) for quota, period in zip(quotas, periods, strict=False) if quota.isdigit()]
    return min(shares)


def _folders(controller: str, groups: Path, root: Path) -> Iterator[Path]:
    """The folder of this process's control group and of all groups above it, for versions 1 and 2 of control groups."""
    with suppress(OSError):
        for line in groups.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controller not in controllers.split(",") and controllers:
                continue
            top = root / controller if controllers else root
            group = top / path.lstrip("/")
            # In a container, the path may be that of the machine outside, which does not exist here.
            yield from [top, *(folder for folder in (group, *group.parents) if folder.is_relative_to(top) and folder != top)]


def _texts(folder: Path, *names: str) -> list[str]:
    """The contents of those of these files that there are."""
    found = []
    for name in names:
        with suppress(OSError):
            found.append((folder / name).read_text(encoding="ascii").strip())
    return found
