"""Compiled functions where machine code can be kept on disk, and where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nmt_train.common.compiled import zeros_below
from nmt_train.common.processor import processor

pytestmark = pytest.mark.slow

SCRIPT = """
import resource
import sys
import numpy as np
from nmt_train.common.compiled import compiled_sums

@compiled_sums
def total(numbers):
    found = 0.0
    for number in numbers:
        found += number
    return found

if sys.argv[1:] == ["full"]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
print(total(np.arange(5.0)))
"""


def run(folder: Path, *arguments: str, **environment: str) -> Path:
    """Run the script, and return the folder in which machine code is to be kept."""
    script = folder / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("10.0\n", 0), done.stderr
    return folder / "cache" / "nmt_train" / "compiled"


def test_machine_code_is_kept_in_the_cache_folder(tmp_path: Path) -> None:
    assert any(run(tmp_path).rglob("*.total-*.nbc"))


def test_each_type_of_processor_has_its_folder_of_machine_code(tmp_path: Path) -> None:
    assert [folder.name.split("-", 1)[1] for folder in run(tmp_path).iterdir()] == [processor()]


def test_functions_are_compiled_even_if_no_folder_is_writable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    only_there = {"NUMBA_CACHE_DIR": str(tmp_path / "file"), "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    assert not run(tmp_path, **only_there).exists()


def test_functions_are_compiled_even_if_the_disk_is_full(tmp_path: Path) -> None:
    assert not any(run(tmp_path, "full").rglob("*.total-*.nbc"))


def test_another_version_of_what_a_function_calls_has_another_folder(tmp_path: Path) -> None:
    """numba itself would keep using the machine code of the former version."""
    import nmt_train

    changed = tmp_path / "other" / "nmt_train"
    (changed / "common").mkdir(parents=True)
    for name in (
        "__init__.py",
        "common/__init__.py",
        "common/errors.py",
        "common/paths.py",
        "common/processor.py",
        "common/compiled.py",
    ):
        (changed / name).write_bytes((Path(nmt_train.__file__).parent / name).read_bytes())
    run(tmp_path)
    with (changed / "common" / "compiled.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert len(list(run(tmp_path, PYTHONPATH=str(tmp_path / "other")).iterdir())) == 2


def test_zeros_below_a_power_of_two_are_its_exponent() -> None:
    assert [zeros_below(np.uint64(1 << exponent)) for exponent in range(64)] == list(range(64))
