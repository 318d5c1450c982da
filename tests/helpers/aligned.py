"""An artificial language pair whose word alignments are known: the translation of a sentence is its words, last one first."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

_STARTS, _ENDS = ("ba", "do", "fi", "gu", "ke", "la"), ("mi", "no", "pu", "re", "so")
SOURCE = [start + end for start in _STARTS for end in _ENDS]  # each has two syllables, and most have several pieces
TARGET = [f"{end}{start}x" for start in _STARTS for end in _ENDS]
Pair = tuple[str, str, str]  # source, target, alignment in Pharaoh format


def pairs(count: int, seed: int, longest: int = 6) -> list[Pair]:
    draw, found = random.Random(seed), []
    for _ in range(count):
        words = [draw.randrange(len(SOURCE)) for _ in range(draw.randint(2, longest))]
        links = " ".join(f"{place}-{len(words) - 1 - place}" for place in range(len(words)))
        found.append((" ".join(SOURCE[word] for word in words), " ".join(TARGET[word] for word in reversed(words)), links))
    return found


def write(folder: Path, part: str, lines: list[Pair]) -> list[str]:
    """Write PART.source, PART.target and PART.alignment; return their paths."""
    paths = [folder / f"{part}.{name}" for name in ("source", "target", "alignment")]
    for path, column in zip(paths, zip(*lines, strict=True), strict=True):
        path.write_text("".join(line + "\n" for line in column), encoding="utf-8")
    return [str(path) for path in paths]


def corpus(folder: Path, count: int) -> dict[str, Any]:
    """Keys of the section corpus, whose training corpus of `count` pairs has alignments."""
    *files, alignments = write(folder, "train", pairs(count, 1))
    valid = write(folder, "valid", pairs(20, 2))[:2]
    return {"train": [{"files": files, "alignments": alignments}], "valid": valid, "vocabulary": {"size": 76}}
