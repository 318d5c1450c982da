"""The inputs from which schedules and exchanges are built."""

from __future__ import annotations

from dataclasses import dataclass

from nmt_train.distributed.codec import CODECS
from nmt_train.distributed.codec.codec import Codec
from nmt_train.distributed.codec.size_only import SizeOnly
from nmt_train.distributed.plan import Plan
from nmt_train.distributed.transport import Transport
from nmt_train.optim.flat_model import FlatModel
from nmt_train.trace import Trace


@dataclass(frozen=True)
class BuildContext:
    """What one rank needs to build its schedule and exchange. max_in_flight: that of the schedule's class."""

    plan: Plan
    flat: FlatModel
    transport: Transport
    trace: Trace
    max_in_flight: int

    def up(self) -> Codec:
        """A new codec of what workers send. If the model is on torch's `meta` device, messages have sizes but no values."""
        return self._codec(self.plan.up, self.plan.dropped_up)

    def down(self) -> Codec:
        """A new codec of what shards send."""
        return self._codec(self.plan.down, self.plan.dropped_down)

    def _codec(self, name: str, dropped: float) -> Codec:
        codec = CODECS[name].build(self.plan.codecs, dropped)
        return SizeOnly(codec) if self.flat.parameters.is_meta else codec
