"""The configuration section `override`, which replaces individual choices of a mode."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from nmt_train.common.section import STRICT, listed, one_of
from nmt_train.distributed.codec import CODECS
from nmt_train.distributed.exchange import EXCHANGES
from nmt_train.distributed.schedule import SCHEDULES

_CodecName = Annotated[str, one_of(CODECS, {"low-rank": "use override.exchange: powersgd instead"})]


@dataclass(frozen=True, config=STRICT)
class OverrideConfig:
    """Individual choices that replace those of the mode; null: as in the mode."""

    schedule: Annotated[str, one_of(SCHEDULES)] | None = Field(
        default=None, description=f"when workers exchange: {listed(SCHEDULES)}"
    )
    exchange: Annotated[str, one_of(EXCHANGES)] | None = Field(
        default=None, description=f"how workers exchange: {listed(EXCHANGES)}"
    )
    up: _CodecName | None = Field(default=None, description=f"encoding of what workers send: {listed(CODECS)}")
    down: _CodecName | None = Field(default=None, description="encoding of what shards send; the same codecs")
