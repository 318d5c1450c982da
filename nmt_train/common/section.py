"""What every section of the configuration shares: how strictly pydantic reads it."""

from pydantic import ConfigDict

# Frozen sections are declared beside the code that they configure:
#   @dataclass(frozen=True, config=STRICT) class XConfig: key: type = Field(default, description="... [unit]")
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, arbitrary_types_allowed=True)
