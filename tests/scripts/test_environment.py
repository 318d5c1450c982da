"""Environments for tests: versions of dependencies, the interpreter, and what the options of scripts/test choose."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import lowest_versions
import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_the_lowest_versions_are_the_bounds_of_what_builds_runs_and_tests_the_project() -> None:
    project = """
        [build-system]
        requires = ["setuptools>=77.0.1"]
        [project]
        dependencies = ["torch>=2.6", "mpi4py>=4.1"]
        optional-dependencies = { dev = ["pytest-xdist>=3.6"], zstd = ["backports.zstd>=1.0; python_version < '3.14'"] }
    """
    found = lowest_versions.lowest(lowest_versions.requirements(project))
    assert found == ["setuptools==77.0.1", "torch==2.6", "mpi4py==4.1", "pytest-xdist==3.6", "backports.zstd==1.0"]


@pytest.mark.parametrize("requirement", ["torch", "torch<3", "torch>=2.6,<3", "torch~=2.6"])
def test_a_dependency_without_one_lower_bound_is_refused(requirement: str) -> None:
    with pytest.raises(ValueError, match=f"dependency '{requirement}': write it as name>=version"):
        lowest_versions.lowest([requirement])


def test_the_locked_versions_are_not_below_the_lowest_ones() -> None:
    lines = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    locked = {name.lower(): Version(found) for name, found in (line.split("==") for line in lines)}
    for line in lowest_versions.lowest(lowest_versions.requirements(PROJECT)):
        name, bound = line.split("==")
        assert locked[name.lower()] >= Version(bound), name


@pytest.mark.skipif(
    not Path(sys.prefix).name.startswith(".venv-lowest"), reason="not in the environment of scripts/test --lowest"
)
def test_the_tests_with_the_lowest_versions_have_them() -> None:
    for line in lowest_versions.lowest(tomllib.loads(PROJECT)["project"]["dependencies"]):
        requirement = Requirement(line)
        assert requirement.specifier.contains(version(requirement.name)), line


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose scripts/environment makes an interpreter that says how it is called."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(ROOT / "scripts" / "test", scripts)
    says = '#!/usr/bin/env bash\necho "${0#"$PWD/"} $*"\n'
    (scripts / "environment").write_text(
        '#!/usr/bin/env bash\nfolder=${!#}\necho "PYTHON=${PYTHON:-} environment $*"\nmkdir -p "$folder/bin"\n'
        f"printf '%s' '{says}' > \"$folder/bin/python\"\nchmod +x \"$folder/bin/python\"\n",
        encoding="utf-8",
    )
    (scripts / "environment").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "environment", "folder", "pytest_options"),
    [
        ([], "PYTHON= environment .venv", ".venv", ""),
        (["-k", "resume"], "PYTHON= environment .venv", ".venv", " -k resume"),
        (["--quick", "-x"], "PYTHON= environment .venv", ".venv", " -m not slow -x"),
        (["--quick", "--lowest"], "PYTHON= environment --lowest .venv-lowest", ".venv-lowest", " -m not slow"),
        (["--python", sys.executable], f"PYTHON={sys.executable} environment .venv-{HERE}", f".venv-{HERE}", ""),
        (["--python", sys.executable, "--lowest"], f"PYTHON={sys.executable} environment --lowest .venv-lowest-{HERE}",
         f".venv-lowest-{HERE}", ""),
    ],
)  # fmt: skip
def test_the_options_of_scripts_test_choose_an_environment_and_tests(
    project: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], environment: str, folder: str, pytest_options: str
) -> None:
    monkeypatch.delenv("PYTHON", raising=False)
    done = subprocess.run([project / "scripts" / "test", *options], capture_output=True, text=True, check=True)
    tests = f"{folder}/bin/python -m pytest -n 3 --dist worksteal{pytest_options}"
    assert done.stdout.splitlines() == [environment, tests]


@pytest.mark.parametrize(
    ("script", "options", "error"),
    [
        ("test", ["--python", "3.99"], "error: python3.99 was not found; give the path of an interpreter"),
        ("test", ["--python"], "PYTHON is missing: --python 3.12"),
        ("environment", ["--highest"], "error: --highest: no such option; the first lines of scripts/environment explain"),
    ],
)
def test_a_wrong_call_says_what_to_do(script: str, options: list[str], error: str) -> None:
    done = subprocess.run([ROOT / "scripts" / script, *options], capture_output=True, text=True)
    assert done.returncode != 0
    assert error in done.stderr
