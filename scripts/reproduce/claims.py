"""Checks claims of papers against the results of runs.

A claim consists of clauses. It holds if all of them do, and in part if some do; the verdict names those that do not. If no
clause fails, but some are not decided, it is inconclusive. A clause to which the simulated cluster was fitted can only fail: if
no other holds, the claim is "fitted" at best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Generic, TypeVar

from reproduce.runs import Missing, Runs

HOLDS, IN_PART, NOT, INCONCLUSIVE, FITTED = "holds", "holds in part", "does not hold", "inconclusive", "fitted"

_PLURAL = {HOLDS: "hold", IN_PART: "hold in part", NOT: "do not hold"}


@dataclass(frozen=True)
class Clause:
    """One statement of a claim. holds: None if the runs cannot tell.

    fitted: the simulated cluster or the rate was chosen so that it holds. Then it does not make a claim hold.
    """

    says: str
    holds: bool | None
    fitted: bool = False


Judged = tuple[str, Sequence[Clause]]  # our result as text, and the clauses
Found = TypeVar("Found", bound=Runs)


@dataclass(frozen=True)
class Claim(Generic[Found]):
    """One row. `judge` raises Missing without the runs that it needs; `why`: the reason of the verdict.

    fitted: what of the claim the simulated cluster was fitted to, so that it is not a finding.
    """

    id: str
    source: str
    says: str
    judge: Callable[[Found], Judged]
    why: str = ""
    fitted: str = ""


def verdict(clauses: Sequence[Clause]) -> str:
    """In words, with the clauses that do not hold or are not decided."""
    holding, failing, open_ = ([its for its in clauses if its.holds is value] for value in (True, False, None))
    found = any(not its.fitted for its in holding)
    if not failing and open_:
        return f"{INCONCLUSIVE} ({_joined(open_)}{'; the rest holds' if holding else ''})"
    if not failing:
        return HOLDS if found else FITTED
    unless = [f"not: {_joined(failing)}"] * bool(holding or open_) + [f"undecided: {_joined(open_)}"] * bool(open_)
    return (IN_PART if found else NOT) + (f" ({'; '.join(unless)})" if unless else "")


def _joined(clauses: Sequence[Clause]) -> str:
    """What clauses say; the number of seeds, in brackets at the end, only once if it is the same for all."""
    said = [its.says.rpartition(" (") if its.says.endswith("seeds)") else (its.says, "", "") for its in clauses]
    counts = {count for *_, count in said}
    if len(counts) == 1 and counts != {""}:
        return f"{', '.join(what for what, *_ in said)} ({counts.pop()}"
    return ", ".join(its.says for its in clauses)


def within(values: Sequence[float], low: float = -math.inf, high: float = math.inf) -> bool | None:
    """Whether all values (one per seed) lie in a range; None: some do and some do not, or lie on both sides of it."""
    if not values or any(map(math.isnan, values)):
        return None
    if all(low <= value <= high for value in values):
        return True
    return False if all(value < low for value in values) or all(value > high for value in values) else None


def judged(claim: Claim[Found], found: Found) -> Judged:
    """Our result and the clauses; without clauses if runs are missing."""
    try:
        return claim.judge(found)
    except Missing as reason:
        return str(reason), ()


def table(claims: Sequence[Claim[Found]], found: Found, source: str, whose: str) -> list[str]:
    """Lines of Markdown; source, whose: the headers of the columns for the source and for the claim."""
    lines = [f"| row | {source} | {whose} | here | verdict | why |", "|---|---|---|---|---|---|"]
    for claim in claims:
        text, clauses = judged(claim, found)
        reasons = [claim.why] * bool(claim.why) + [f"fitted: {claim.fitted}"] * bool(claim.fitted)
        said, why = (verdict(clauses), "; ".join(reasons)) if clauses else ("-", "")
        lines.append(f"| {claim.id} | {claim.source} | {claim.says} | {text} | {said} | {why} |")
    return [*lines, ""]


def tally(claims: Sequence[Claim[Found]], found: Found) -> str:
    """How many claims have which verdict, as in `3 hold, 1 does not hold`."""
    said = [verdict(clauses).split(" (")[0] for claim in claims if (clauses := judged(claim, found)[1])]
    counts = [(kind, said.count(kind)) for kind in (HOLDS, IN_PART, NOT, FITTED, INCONCLUSIVE)]
    parts = [f"{count} {kind if count == 1 else _PLURAL.get(kind, kind)}" for kind, count in counts if count]
    return ", ".join([*parts, *[f"{len(claims) - len(said)} not run yet"] * (len(said) < len(claims))])


def spread(values: Sequence[float], unit: str = "", decimals: int = 2) -> str:
    """The mean and the range of the values of several seeds, or a single value."""
    middle, low, high = (f"{value:.{decimals}f}" for value in (mean(values), min(values), max(values)))
    return f"{middle}{unit}" if len(values) == 1 else f"{middle}{unit} ({low} to {high})"
