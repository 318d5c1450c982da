"""Times, bandwidths and sizes as a cluster file writes them: a number and its unit."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator

_SI = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*"


def _parser(unit: str, factor: Callable[[re.Match[str]], float], wrong: str, least: float = 0.0) -> Callable[[Any], float]:
    """A function that parses a number and a unit. Code may also pass a number.

    unit: a regular expression. factor: of the unit that was found. wrong: what a text is that is not such a value, or below
    `least`, for error messages.
    """

    def parse(text: Any) -> float:
        if isinstance(text, (int, float)):
            return float(text)
        match = re.fullmatch(_NUMBER + unit, str(text).strip())
        if match is None or (found := float(match[1]) * factor(match)) < least:
            raise ValueError(f"{text!r} is {wrong}")
        return found

    return parse


# Seconds, from a time such as `100us`, `0.9 s` or `2h`.
Seconds = Annotated[float, BeforeValidator(_parser(
    r"(s|ms|us|ns|min|h)", lambda match: _TIME[match[2]],
    "not a time: write a number and s, ms, us, ns, min or h, as in 100us",
))]  # fmt: skip
# Bytes per second, from a bandwidth such as `10 Gbit/s`, `1 Gbps` or `375 MB/s`.
Bandwidth = Annotated[float, BeforeValidator(_parser(
    r"([kKmMgG]?)(?:(bits?|b)|B)(?:/s|ps)?", lambda match: _SI[match[2].upper()] / (8 if match[3] else 1),
    "not a bandwidth: write a positive number and bit/s or B/s, as in 10 Gbit/s", sys.float_info.min,
))]  # fmt: skip
# Bytes, from a size such as `16 GB`.
Size = Annotated[float, BeforeValidator(_parser(
    r"([kKmMgG]?)B", lambda match: _SI[match[2].upper()], "not a size: write it as 16 GB"
))]  # fmt: skip
# A number of elements such as `110.7M`.
Count = Annotated[float, BeforeValidator(_parser(
    r"([kMG]?)", lambda match: _SI[match[2].upper()], "not a number of parameters: write it as 110.7M", 1.0
))]  # fmt: skip
