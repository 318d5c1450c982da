"""The configuration section `override`, which replaces codecs of a mode."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from nmt_train.common.section import STRICT, listed, one_of
from nmt_train.distributed.codec import CODECS

_CodecName = Annotated[str, one_of(CODECS, {"low-rank": "use mode powersgd instead"})]


@dataclass(frozen=True, config=STRICT)
class OverrideConfig:
    """Codecs that replace those of the mode; null: as in the mode."""

    up: _CodecName | None = Field(default=None, description=f"encoding of what workers send: {listed(CODECS)}")
    down: _CodecName | None = Field(default=None, description="encoding of what shards send; the same codecs")
