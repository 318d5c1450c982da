"""Durations in Marian's notation: `10e` epochs, `500u` updates, `300Kt` target tokens, `2h`, `30m`, `90s`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core.core_schema import CoreSchema, no_info_plain_validator_function, plain_serializer_function_ser_schema

_MULTIPLES = {"": 1, "K": 1_000, "M": 1_000_000, "G": 1_000_000_000}
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)([KMG]?)([eutsmh])")
_FORM = "a number and a unit: e (epochs), u (updates), t (target tokens), s, m or h, as in 10e, 500u, 300Kt, 2h"


class Progressed(Protocol):
    """The training progress that a duration is compared with; `seconds` is wall-clock time."""

    @property
    def epochs(self) -> int: ...
    @property
    def updates(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class Mark(NamedTuple):
    """The training progress at one moment."""

    epochs: int
    updates: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Duration:
    """A positive amount of one unit; `text` is how the user wrote it."""

    amount: float
    unit: str
    text: str

    @classmethod
    def parse(cls, text: Any) -> Duration:
        """Parse `10e`, `500u`, `300Kt` or `2h`; the message of a ValueError describes the accepted form."""
        if isinstance(text, Duration):
            return text
        match = _PATTERN.fullmatch(str(text))
        if match is None:
            raise ValueError(f"{text!r} is not a duration: write {_FORM}")
        number, multiple, unit = match.groups()
        # Exactly: 4.1 * 1e6 is less than 4,100,000.
        amount = float(Decimal(number) * Decimal(_MULTIPLES[multiple]) * Decimal(_SECONDS.get(unit, 1)))
        if not 0 < amount < math.inf:
            raise ValueError(f"{text!r} is not a duration: it must be more than zero{', and finite' * (amount > 0)}")
        length = cls(amount, unit, str(text))
        if length.counts and amount != int(amount):
            raise ValueError(f"{text!r} is not a duration: epochs, updates and tokens are whole numbers")
        return length

    @property
    def counts(self) -> bool:
        """Whether this is a number of epochs, updates or tokens, not a time."""
        return self.unit in "eut"

    def measure(self, progress: Progressed) -> float:
        """Return the progress in the unit of this duration."""
        return {"e": progress.epochs, "u": progress.updates, "t": progress.tokens}.get(self.unit, progress.seconds)

    def reached(self, progress: Progressed) -> bool:
        """Whether training has lasted at least this long."""
        return self.measure(progress) >= self.amount

    def crossed(self, before: Progressed, after: Progressed) -> bool:
        """Whether a multiple of this duration lies in (before, after]; this needs no stored state."""
        return self.measure(after) // self.amount > self.measure(before) // self.amount

    def __str__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A configuration key of this type holds the text."""
        return no_info_plain_validator_function(cls.parse, serialization=plain_serializer_function_ser_schema(str))


def number_of_updates(value: Any) -> Any:
    """Replace a duration in updates by their number; ValueError for one in another unit; use it as a BeforeValidator."""
    try:
        length = Duration.parse(value)
    except ValueError:
        return value  # perhaps a number
    if length.unit != "u":
        raise ValueError(f"{length} is not a number of updates; write it as 16000 or 16Ku")
    return int(length.amount)


Updates = Annotated[int, Field(ge=0, le=10**9), BeforeValidator(number_of_updates)]  # with or without their unit


class Pace:
    """When something that takes time is due again: after each multiple of an interval.

    If the interval is a time, it is due at the earliest after 20 times what the last one took, so that it takes at most a
    twentieth of the time. Intervals in updates or words are kept exactly, so that results do not depend on the clock.
    """

    _RATIO = 20

    def __init__(self, every: Duration, last: Mark | None = None) -> None:
        """last: the progress at the last one; None: the first one is due at once."""
        self._every, self._last = every, last
        self._earliest = -math.inf  # in seconds of the progress

    def due(self, now: Mark) -> bool:
        """Whether it is due; if so, it begins `now`, and an interval in time waits until it is over (`took`)."""
        if self._last is not None and not (self._every.crossed(self._last, now) and now.seconds >= self._earliest):
            return False
        self._last, self._earliest = now, -math.inf if self._every.counts else math.inf
        return True

    def took(self, seconds: float) -> None:
        """Record that the last one is over, and how long it took."""
        if self._last is not None and not self._every.counts:
            self._earliest = self._last.seconds + self._RATIO * seconds

    def lengthened(self, interval: float, seconds: float) -> float:
        """The interval [seconds] between two of them if one takes `seconds`."""
        return interval if self._every.counts else max(interval, self._RATIO * seconds)
