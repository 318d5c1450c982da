"""What a schedule and an exchange are built from."""

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

    source: the paper; optimizer: where gradients become updates, shard or worker; nodes: most machines (0: any number);
    workers: how many exchange (known once ranks are); settings: values of keys that the configuration leaves to the mode.
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
    """One rank's. settings: the whole configuration as it is in force, of which each class takes its own section.

    max_in_flight: exchanges that may be under way while a gradient is computed; schedule_updates: the schedule turns gradients
    into finished updates.
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
        """Whether gradients are joined by their sum, not by their mean."""
        return bool(self.settings.batch.reduction == "sum")

    def codec(self, name: str, dropped: float) -> Codec:
        """A codec for vectors like the model's: if those have no values, messages have only sizes."""
        codec = CODECS[name].build(self.settings, dropped)
        return SizeOnly(codec) if self.flat.parameters.is_meta else codec
