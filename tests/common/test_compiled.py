"""Compiled functions where machine code can be kept on disk, and where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nmt_train.common.compiled import zeros_below

SCRIPT = """
import numpy as np
from nmt_train.common.compiled import compiled_sums

@compiled_sums
def total(numbers):
    found = 0.0
    for number in numbers:
        found += number
    return found

print(total(np.arange(5.0)))
"""


@pytest.mark.parametrize("writable", [True, False])
def test_machine_code_is_kept_on_disk_if_there_is_a_place_for_it(tmp_path: Path, writable: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    cache = tmp_path / "cache" if writable else script / "no folder"
    run = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "NUMBA_CACHE_DIR": str(cache)}, capture_output=True, text=True
    )
    assert (run.stdout, run.returncode) == ("10.0\n", 0), run.stderr
    assert any(cache.rglob("*.nbi")) if writable else not cache.exists()


def test_zeros_below_a_power_of_two_are_its_exponent() -> None:
    assert [zeros_below(np.uint64(1 << exponent)) for exponent in range(64)] == list(range(64))
