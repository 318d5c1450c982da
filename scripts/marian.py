"""The commands of the real Marian, from the package pymarian, which is not a dependency.

pip install --no-deps --target FOLDER pymarian==1.12.42 (604 MB, for Python 3.11), then PYTHONPATH=FOLDER.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INSTALLED = importlib.util.find_spec("_pymarian") is not None
_MAIN = "import sys, _pymarian; sys.exit(_pymarian.main(sys.argv[1:]))"


def marian(command: str, *options: Any, lines: Sequence[str] = (), threads: int = 1) -> list[str]:
    """Run a command of Marian (train, decode, score) on the CPU with these options and lines on stdin; return its output.

    Marian ends the process after an error, so it gets one of its own. Raises SystemExit with the end of what it said.
    """
    done = subprocess.run(
        [sys.executable, "-c", _MAIN, command, *map(str, options), "--cpu-threads", str(threads)],
        input="".join(f"{line}\n" for line in lines), capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"error: marian {command} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()


def start(command: str, *options: Any, threads: int) -> subprocess.Popen[str]:
    """Start a command of Marian, whose log can be read from `stderr`."""
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, command, *map(str, options), "--cpu-threads", str(threads)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def score(model: Path, vocabularies: Sequence[Path], source: Path, target: Path) -> list[float]:
    """Log-probability of each target; source and target are files."""
    found = marian("score", "-m", model, "-v", *_both(vocabularies), "-t", source, target, "--mini-batch", 32, "-w", 512)
    return [float(line) for line in found]


def decode(model: Path, vocabularies: Sequence[Path], lines: Sequence[str], beam: int = 5) -> list[str]:
    """The best translation of each line, by length-normalized score."""
    return marian(
        "decode", "-m", model, "-v", *_both(vocabularies), "-b", beam, "-n", 1, "--mini-batch", 32, "--maxi-batch", 100,
        "--maxi-batch-sort", "src", "-w", 512, "--quiet", lines=lines,
    )  # fmt: skip


def _both(vocabularies: Sequence[Path]) -> tuple[Path, Path]:
    return vocabularies[0], vocabularies[-1]
