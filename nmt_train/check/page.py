"""The page that nmt-train --check prints, a line at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from nmt_train.common.errors import UserError

_WIDTH = 12  # of the first column


class Page:
    """warnings: how many there were. reasons: why training could not begin."""

    def __init__(self) -> None:
        self.warnings = 0
        self.reasons: list[UserError] = []

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Make a UserError one of the reasons, so that the page continues with what does not depend on it."""
        try:
            yield
        except UserError as error:
            if str(error) not in map(str, self.reasons):
                self.reasons.append(error)

    def refuse(self) -> NoReturn:
        """Raise UserError with all reasons."""
        if len(self.reasons) == 1:
            raise self.reasons[0]
        raise UserError("\n  ".join([f"{len(self.reasons)} reasons prevent training:", *map(str, self.reasons)]))

    def title(self, text: str) -> None:
        print(text, flush=True)

    def line(self, what: str, value: str, warning: str = "") -> None:
        """warning: what is bad about the value, and what to do; empty if nothing is."""
        print(f"  {what:<{_WIDTH}}{value}", flush=True)
        if warning:
            self.warnings += 1
            print(f"  {'':<{_WIDTH}}warning: {warning}", flush=True)


def size(number: float) -> str:
    """A number of bytes."""
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def share(part: float, whole: float) -> str:
    """A number and which share of the whole it is."""
    return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"


def amount(number: float) -> str:
    """A large number, rounded."""
    return f"{number / 1e9:.1f}G" if number >= 1e9 else f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number:,.0f}"
