"""A row of scripts/check_gpu, and what several of them need."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepare import ROOT

NOT_RUN = "not run"  # prefix of the result of a row that could not run
LAST_WORDS = 300  # characters of the output of a failed row


@dataclass(frozen=True)
class Row:
    """A check. `work` gets a device and its own folder; it returns its result as text, or raises."""

    stage: str
    name: str
    seconds: float  # time limit
    work: Callable[[str, Path], str]
    alone: bool = False  # it measures speed
    cpu: bool = True  # can be tried on the CPU


class Failed(Exception):
    """A check failed; the message says why."""


def corpus(folder: Path) -> Path:
    found = folder.parent / "corpus"
    if not (found / "train.en").exists():
        beside = folder.parent / f"corpus.{os.getpid()}"
        runpy.run_path(str(ROOT / "scripts" / "make_demo_corpus"))["make"](beside, 1, 2000, 50)
        with suppress(OSError):  # another row has created it first
            beside.rename(found)
    return found


def corpus_settings(folder: Path) -> dict[str, Any]:
    data = corpus(folder)
    sides = {f"corpus.{part}": [f"{data}/{part}.en", f"{data}/{part}.de"] for part in ("train", "valid")}
    return sides | {"corpus.vocabulary.size": 300}


def call(module: str, settings: dict[str, Any], *more: str) -> str:
    """Call the command of a module; returns its output."""
    command = [sys.executable, "-c", f"import sys; from {module} import main; sys.exit(main())", *more]
    for key, value in settings.items():
        command += [f"--{key}", json.dumps(value) if isinstance(value, list) else str(value)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise Failed(f"status {done.returncode}: {done.stderr[-LAST_WORDS:]}")
    return done.stdout
