"""Times, bandwidths and sizes as a cluster file writes them: a number and its unit."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

_SI = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_BANDWIDTH = {name.upper(): factor for name, factor in _SI.items()}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*"


def _seconds(text: Any) -> float:
    """Parse a time such as `100us`, `0.9 s` or `2h` into seconds. Code may also pass a number of seconds."""
    if isinstance(text, (int, float)):
        return float(text)
    match = re.fullmatch(_NUMBER + r"(s|ms|us|ns|min|h)", str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a time: write a number and s, ms, us, ns, min or h, as in 100us")
    return float(match[1]) * _TIME[match[2]]


def _bandwidth(text: Any) -> float:
    """Parse a bandwidth such as `10 Gbit/s`, `1 Gbps` or `375 MB/s` into bytes per second. Code may also pass a number."""
    if isinstance(text, (int, float)):
        return float(text)
    match = re.fullmatch(_NUMBER + r"([kKmMgG]?)(?:(bits?|b)|B)(?:/s|ps)?", str(text).strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is not a bandwidth: write a positive number and bit/s or B/s, as in 10 Gbit/s")
    return float(match[1]) * _BANDWIDTH[match[2].upper()] / (8 if match[3] else 1)


def _count(text: Any) -> float:
    """Parse a number of elements such as `110.7M`. Code may also pass a number."""
    if isinstance(text, (int, float)):
        return float(text)
    match = re.fullmatch(_NUMBER + r"([kMG]?)", str(text).strip())
    if match is None or float(match[1]) * _SI[match[2]] < 1:
        raise ValueError(f"{text!r} is not a number of parameters: write it as 110.7M")
    return float(match[1]) * _SI[match[2]]


def _size(text: Any) -> float:
    """Parse a size such as `16 GB` into bytes. Code may also pass a number."""
    if isinstance(text, (int, float)):
        return float(text)
    match = re.fullmatch(_NUMBER + r"([kKmMgG]?)B", str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write it as 16 GB")
    return float(match[1]) * _BANDWIDTH[match[2].upper()]


Seconds = Annotated[float, BeforeValidator(_seconds)]
Bandwidth = Annotated[float, BeforeValidator(_bandwidth)]
Size = Annotated[float, BeforeValidator(_size)]
Count = Annotated[float, BeforeValidator(_count)]
