"""Limits of control groups, of both versions, wherever above a process they are set."""

from __future__ import annotations

from pathlib import Path

import pytest

from nmt_train.common import container


def groups(tmp_path: Path, lines: str, files: dict[str, str]) -> tuple[Path, Path]:
    (tmp_path / "cgroup").write_text(lines, encoding="utf-8")
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return tmp_path / "cgroup", tmp_path / "root"


@pytest.mark.parametrize(
    ("lines", "files", "memory", "cores"),
    [
        ("0::/a/b\n", {"a/memory.max": "1000", "a/b/memory.max": "max", "a/b/cpu.max": "150000 100000"}, 1000, 1.5),
        ("0::/a/b\n", {"memory.max": "5000", "a/memory.max": "7000", "a/cpu.max": "max 100000"}, 5000, float("inf")),
        (
            "4:cpu,cpuacct:/job\n3:memory:/outside/this/container\n",
            {
                "cpu/job/cpu.cfs_quota_us": "50000",
                "cpu/job/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "9000",
            },
            9000,
            0.5,
        ),
        (
            "2:cpu:/\n1:memory:/\n",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            float("inf"),
            float("inf"),
        ),
        ("", {}, float("inf"), float("inf")),
    ],
    ids=["version 2", "the group above", "version 1", "no limit", "no groups"],
)
def test_the_smallest_limit_of_all_groups_counts(
    tmp_path: Path, lines: str, files: dict[str, str], memory: float, cores: float
) -> None:
    where = groups(tmp_path, lines, files)
    assert container.memory(*where) == memory
    assert container.cores(*where) == cores


def test_a_system_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert container.memory(tmp_path / "absent", tmp_path) == container.cores(tmp_path / "absent", tmp_path) == float("inf")
