"""Random changes of training sentences that make models robust: letter case, typing errors, missing end punctuation."""

from __future__ import annotations

from dataclasses import fields
from string import capwords

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from nmt_train.common.section import STRICT

_END = ".!?。！？…"


@dataclass(frozen=True, config=STRICT)
class Noise:
    """Probabilities with which a pair is changed; each change is drawn independently.

    upper, lower, title: both sides in this letter case; at most one of them applies. typos: in the source, one word of ten has
    a typing error: two letters swapped, one left out, or one doubled. no_end: both sides without punctuation at their end.
    """

    upper: float = Field(default=0.0, ge=0, le=1)
    lower: float = Field(default=0.0, ge=0, le=1)
    title: float = Field(default=0.0, ge=0, le=1)
    typos: float = Field(default=0.0, ge=0, le=1)
    no_end: float = Field(default=0.0, ge=0, le=1)

    def apply(self, source: str, target: str, random: np.random.Generator) -> tuple[str, str]:
        """Return the changed pair; it depends only on the texts and on the state of `random`."""
        happens = {kind.name: bool(random.random() < getattr(self, kind.name)) for kind in fields(self)}
        case = next((change for change in ("upper", "lower", "title") if happens[change]), None)
        if case == "title":
            source, target = capwords(source, " "), capwords(target, " ")
        elif case:
            source, target = getattr(source, case)(), getattr(target, case)()
        if happens["no_end"]:
            source, target = (text.rstrip(_END + " ") or text for text in (source, target))
        return (_with_typos(source, random) if happens["typos"] else source), target


def _with_typos(text: str, random: np.random.Generator) -> str:
    words = text.split(" ")
    long = [number for number, word in enumerate(words) if len(word) > 2]
    if not long:
        return text
    for number in random.choice(long, size=-(-len(long) // 10), replace=False):
        word = words[number]
        place, kind = int(random.integers(len(word) - 1)), int(random.integers(3))
        swapped = word[place + 1] + word[place]
        words[number] = (
            word[:place] + (swapped, word[place + 1], word[place] + word[place : place + 2])[kind] + word[place + 2 :]
        )
    return " ".join(words)
