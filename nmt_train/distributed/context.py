"""The inputs from which schedules and exchanges are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nmt_train.distributed.codec import CODECS
from nmt_train.distributed.codec.codec import Codec
from nmt_train.distributed.codec.size_only import SizeOnly
from nmt_train.distributed.transport import Transport
from nmt_train.optim.flat_model import FlatModel
from nmt_train.trace import Trace


@dataclass(frozen=True)
class Mode:
    """One row of the table of modes: the names of a schedule, an exchange and the codecs of both directions.

    up, down: the codecs of workers and of shards. source: the paper. optimizer: which of them turns gradients into updates,
    worker or shard. nodes: maximum number of machines (0: no limit). workers: number of workers that exchange; set once the
    ranks are known. settings: values of the keys that the configuration leaves to the mode, as in {"local.every": 10}.
    """

    schedule: str
    exchange: str
    up: str
    down: str
    source: str
    optimizer: str = "shard"
    nodes: int = 0
    workers: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BuildContext:
    """What one rank needs to build its schedule and exchange.

    settings: the whole configuration in force; each class reads its own section. max_in_flight, schedule_updates: the values
    of `max_in_flight` and `updates` of the schedule's class.
    """

    settings: Any
    mode: Mode
    flat: FlatModel
    transport: Transport
    trace: Trace
    max_in_flight: int
    schedule_updates: bool

    @property
    def sums(self) -> bool:
        """Whether gradients are summed, not averaged (batch.reduction: sum)."""
        return bool(self.settings.batch.reduction == "sum")

    def codec(self, name: str, dropped: float) -> Codec:
        """A new codec `name`. If the model is on torch's `meta` device, its messages have sizes but no values."""
        codec = CODECS[name].build(self.settings, dropped)
        return SizeOnly(codec) if self.flat.parameters.is_meta else codec
