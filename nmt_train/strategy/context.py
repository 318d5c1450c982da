"""The inputs from which strategies are built."""

from __future__ import annotations

from dataclasses import dataclass

from nmt_train.codec import CODECS
from nmt_train.codec.codec import Codec
from nmt_train.codec.size_only import SizeOnly
from nmt_train.optim.flat_model import FlatModel
from nmt_train.strategy.plan import Plan
from nmt_train.trace import Trace
from nmt_train.transport import Transport


@dataclass(frozen=True)
class BuildContext:
    """What one rank needs to build its strategy."""

    plan: Plan
    flat: FlatModel
    transport: Transport
    trace: Trace

    def codec(self, name: str, dropped: float = 0.0) -> Codec:
        """A new codec. dropped: the share of elements that it does not send, if it drops any.

        If the model is on torch's `meta` device, messages have sizes but no values.
        """
        codec = CODECS[name].build(self.plan.codecs, dropped)
        return SizeOnly(codec) if self.flat.parameters.is_meta else codec
