"""Print the lowest version of each dependency that pyproject.toml allows, as constraints of pip, for scripts/environment."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def lowest(requirements: list[str]) -> list[str]:
    """`name==bound` for each `name>=bound`. Raises ValueError for a requirement of another form."""
    found = []
    for requirement in requirements:
        parts = re.fullmatch(r"([\w.-]+)>=([\d.]+)(?:;.*)?", requirement)
        if parts is None:
            raise ValueError(f"pyproject.toml: dependency {requirement!r}: write it as name>=version")
        found.append("==".join(parts.groups()))
    return found


def requirements(text: str) -> list[str]:
    """What pyproject.toml requires: to build, to run, and for the extras."""
    values = tomllib.loads(text)
    project = values["project"]
    extras = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    return [*values["build-system"]["requires"], *project["dependencies"], *extras]


if __name__ == "__main__":
    try:
        print(*lowest(requirements(PROJECT.read_text(encoding="utf-8"))), sep="\n")
    except ValueError as error:
        sys.exit(f"error: {error}")
