"""Checks claims of papers against the results of runs.

A claim holds if the runs confirm its order and its size; it holds in part if they confirm only the order.
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
    """One row. `judge` returns our result as text, and a verdict; `why`: the reason if the claim does not hold fully."""

    id: str
    source: str
    says: str
    judge: Callable[[Found], tuple[str, str]]
    why: str = ""


def verdict(order: bool, size: bool) -> str:
    return (HOLDS if size else IN_PART) if order else NOT


def table(claims: Sequence[Claim[Found]], found: Found, source: str, whose: str) -> list[str]:
    """Lines of Markdown; source, whose: the headers of the columns for the source and for the claim."""
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
