"""Claims of papers, judged by what runs found.

A claim holds if what it says of order and of size is found; in part, if the order is but not the size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from nmt_train.common.errors import UserError
from reproduce.runs import Missing, NotReached, Runs

HOLDS, IN_PART, NOT = "holds", "holds in part", "does not hold"


Found = TypeVar("Found", bound=Runs)


@dataclass(frozen=True)
class Claim(Generic[Found]):
    """One row: `judge` gives what we found, in words, and a verdict; `why`: the reason, where it does not hold."""

    id: str
    source: str
    says: str
    judge: Callable[[Found], tuple[str, str]]
    why: str = ""


def verdict(order: bool, size: bool) -> str:
    return (HOLDS if size else IN_PART) if order else NOT


def table(claims: Sequence[Claim[Found]], found: Found, source: str, whose: str) -> list[str]:
    """Lines of Markdown; source and whose: what the columns of places and of claims are called."""
    lines = [f"| row | {source} | {whose} | here | verdict |", "|---|---|---|---|---|"]
    for claim in claims:
        try:
            text, judged = claim.judge(found)
            if judged != HOLDS and claim.why:
                judged += f": {claim.why}"
        except (Missing, NotReached) as reason:
            text, judged = str(reason), "-"
        except UserError:
            text, judged = "not all of its runs were made", "-"
        lines.append(f"| {claim.id} | {claim.source} | {claim.says} | {text} | {judged} |")
    return [*lines, ""]


def listed(values: Sequence[float], what: str) -> str:
    return f"{what}: {', '.join(f'{value:,.0f}' for value in values)}"


def as_fast(found: dict[str, float], than: str = "as 1x1") -> str:
    shown = ", ".join(f"{name} {value:.2f}x" for name, value in found.items() if value)
    never = ", ".join(name for name, value in found.items() if not value)
    return "; ".join([f"{shown} as fast {than}"] * bool(shown) + [f"not reached in time: {never}"] * bool(never))
