"""The page that nmt-train --check prints, a line at a time."""

from __future__ import annotations

_WIDTH = 12  # of the first column


class Page:
    """warnings: how many there were."""

    def __init__(self) -> None:
        self.warnings = 0

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
