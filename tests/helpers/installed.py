"""Wheels of the project, and environments without a network, which borrow packages from the environment of the tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent.parent
# No configuration, cache or index of the user: pip takes what is installed, or fails.
OFFLINE = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}


def wheel(folder: Path) -> Path:
    """A wheel, built in `folder` from a copy of the files that it is made of."""
    source = folder / "source"
    shutil.copytree(ROOT / "nmt_train", source / "nmt_train", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (built,) = folder.glob("*.whl")
    return built


def needed(requirements: Iterable[str]) -> list[Distribution]:
    """The installed distributions that these requirements need, directly or not, without nmt_train itself."""
    waiting = [Requirement(requirement) for requirement in requirements]
    found: dict[tuple[str, frozenset[str]], Distribution] = {}
    while waiting:
        requirement = waiting.pop()
        key = (requirement.name, frozenset(requirement.extras))
        if key not in found:
            found[key] = distribution(requirement.name)
            for line in found[key].requires or ():
                part = Requirement(line)
                if part.marker is None or any(part.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
                    waiting.append(part)
    return [found[key] for key in found if key[0] != "nmt_train"]


def borrow(environment: Path, requirements: Iterable[str]) -> None:
    """Link what these requirements need, file by file, into an environment: an uninstallation there removes links only."""
    (packages,) = environment.glob("lib/python*/site-packages")
    for package in needed(requirements):
        for file in package.files or ():
            own, link = Path(str(package.locate_file(file))), packages / file
            if own.exists() and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(own.resolve())


if __name__ == "__main__":  # installed.py ENVIRONMENT REQUIREMENT...
    borrow(Path(sys.argv[1]), sys.argv[2:])
