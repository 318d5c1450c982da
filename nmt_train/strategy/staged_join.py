"""Workers join in waves: `{4: 0u, 8: 2000u}` means four at first and eight after 2,000 updates (Farrell & Yang 2016, 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, PlainSerializer

from nmt_train.common.duration import Duration, Progressed
from nmt_train.common.yaml_file import TooMuch, value

_FORM = "workers and when they join, the first at 0u, as in {4: 0u, 8: 2000u}"


@dataclass(frozen=True)
class Waves:
    """How many workers train: `first` at the start, then those of each entry in `later`; worker counts and spans increase."""

    first: int
    later: tuple[tuple[int, Duration], ...] = ()

    @classmethod
    def parse(cls, given: Any) -> Waves:
        """Parse a mapping, or its YAML text; raises ValueError, which shows the accepted form."""
        if isinstance(given, Waves):
            return given
        pairs = list(_mapping(given).items())
        try:
            counts = [int(str(count)) for count, _ in pairs]
            later = [Duration.parse(when) for _, when in pairs[1:]]
        except ValueError as error:
            raise ValueError(f"{given!r} is not waves of workers ({error}): write {_FORM}") from None
        spans = [0.0, *(span.amount for span in later)]
        if not pairs or str(pairs[0][1])[:-1] != "0" or counts[0] < 1:
            raise ValueError(f"{given!r} does not say how many workers begin: write {_FORM}")
        if len({span.unit for span in later}) > 1:
            raise ValueError(f"{given!r}: the waves are counted in different units; use one")
        if any(b <= a for values in (counts, spans) for a, b in pairwise(values)):
            raise ValueError(f"{given!r}: each wave needs more workers, and comes later, than the one before")
        return cls(counts[0], tuple(zip(counts[1:], later, strict=True)))

    @property
    def most(self) -> int:
        """Number of workers after the last wave."""
        return self.later[-1][0] if self.later else self.first

    def workers(self, progress: Progressed) -> int:
        """How many workers train at this progress."""
        return max([self.first, *(count for count, span in self.later if span.reached(progress))])

    def at_most(self, ranks: int) -> Waves:
        """The same waves for fewer ranks: a wave that needs more has as many as there are, and later ones are left out."""
        fitting = [(count, span) for count, span in self.later if count < ranks]
        rest = [span for count, span in self.later if count >= ranks > self.first]
        return Waves(min(self.first, ranks), (*fitting, *((ranks, span) for span in rest[:1])))

    def __str__(self) -> str:
        unit = self.later[0][1].unit if self.later else "u"
        return "{" + ", ".join([f"{self.first}: 0{unit}", *(f"{count}: {span}" for count, span in self.later)]) + "}"


def _mapping(given: Any) -> Mapping[Any, Any]:
    try:
        values = value(given) if isinstance(given, str) else given
    except TooMuch as error:
        raise ValueError(f"{given[:40]!r}... {error}: write {_FORM}") from None
    except (yaml.YAMLError, ValueError):
        values = None
    if not isinstance(values, Mapping):
        raise ValueError(f"{given!r} is not waves of workers: write {_FORM}")
    return values


Joining = Annotated[Waves, BeforeValidator(Waves.parse), PlainSerializer(str)]
