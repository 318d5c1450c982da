"""Shared by all configuration sections: the pydantic settings, validators for names from a registry, and error texts."""

import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import AfterValidator, ConfigDict, ValidationError

# Frozen sections are declared beside the code that they configure:
#   @dataclass(frozen=True, config=STRICT) class XConfig: key: type = Field(default, description="... [unit]")
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, arbitrary_types_allowed=True)
_WORDS = {  # by pydantic's types of errors
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "it should be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "it should be a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "it should be true or false"),
}
_WITHOUT_VALUE = ("value_error", "missing", "unexpected_keyword_argument", "string_unicode")


def as_list(value: Any) -> Any:
    """Accept a single value where a list is wanted; use it as a BeforeValidator."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def one_of(registry: Mapping[str, Any]) -> AfterValidator:
    """Return a validator for a key whose value is a name in `registry`; it also accepts names that are registered later."""

    def check(name: str) -> str:
        if name not in registry:
            raise ValueError(f"it should be {listed(registry)}, not {name!r}")
        return name

    return AfterValidator(check)


class Problem(NamedTuple):
    """What pydantic found first: the type of the error, the keys that lead to the value, what is wrong, and the value."""

    kind: str
    path: list[str]
    what: str
    value: str

    @property
    def text(self) -> str:
        return self.what + self.value


def problem(error: ValidationError) -> Problem:
    first = error.errors()[0]
    text = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    text = re.sub(r"a dictionary or an instance of \w+", "keys with their values", text)
    text = _WORDS.get(first["type"], text)
    text = "there is no such key" if first["type"] == "unexpected_keyword_argument" else text
    if first["type"] == "string_unicode":  # bytes of the command line that are not text
        encoding = sys.getfilesystemencoding()
        text = f"its bytes are not {encoding}, the encoding of this locale; write it in this encoding"
        text += "" if encoding == "utf-8" else ", or set PYTHONUTF8=1"
    given = "" if first["type"] in _WITHOUT_VALUE else f", not {first['input']!r}"
    return Problem(first["type"], [str(part) for part in first["loc"] if part != "[key]"], text, given)


def listed(registry: Mapping[str, Any]) -> str:
    """Return the names as `a, b or c`."""
    *names, last = registry
    return f"{', '.join(names)} or {last}" if names else last
