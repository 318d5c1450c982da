"""Exchange after every step, in parts: gradients of later layers travel while those of earlier ones are computed.

As in Li et al. 2020 (PyTorch Distributed, 3.2.3): a part sets out once the backward pass has been through all of its
parameters, and not before the part behind it in the vector, so that all workers sum them in the same order.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.all_reduce import AllReduce
from nmt_train.distributed.exchange.exchange import Exchange
from nmt_train.distributed.schedule.background import BackgroundTask
from nmt_train.distributed.schedule.every_step import EveryStep
from nmt_train.distributed.transport import Transport
from nmt_train.optim.flat_model import FlatModel
from nmt_train.trace import Trace


class Bucketed(EveryStep):
    """The vector is cut into buckets of one size, which leave from its end, where the last layers are, to its beginning.

    Where tasks do not go on while another computes, as on a simulated clock, buckets set out after the backward pass, each when
    its share of the pass's time is over.
    """

    works_with = AllReduce
    alone = False

    @classmethod
    def build(cls, context: BuildContext, exchange: Exchange) -> Bucketed:
        assert isinstance(exchange, AllReduce), "others are refused"
        settings = context.settings
        return cls(
            context.flat, exchange, context.transport, context.trace, settings.batch.accumulate, settings.exchange.buckets,
            context.sums,
        )  # fmt: skip

    def __init__(
        self,
        flat: FlatModel,
        exchange: AllReduce,
        transport: Transport,
        trace: Trace,
        accumulate: int,
        buckets: int,
        sums: bool = False,
    ) -> None:
        super().__init__(flat, exchange, 0.0, accumulate, sums)
        self._all_reduce, self._trace = exchange, trace  # with both of its halves
        count = flat.gradient.numel()
        buckets = min(buckets, count)
        self._buckets = [slice(count * part // buckets, count * (part + 1) // buckets) for part in reversed(range(buckets))]
        self._waiting = deque[slice]()  # buckets of this exchange that have not set out
        self._missing: dict[int, int] = {}  # elements that the backward pass still owes to a bucket, by its beginning
        self._begun = False  # whether some bucket of this exchange may have set out
        self._weight = 0  # of this exchange
        self._background = BackgroundTask(transport, trace, exchange.transfer)
        if transport.parallel:
            flat.watch(self._computed)

    def backward(self, loss: Tensor, tokens: int, trace: Trace) -> None:
        if self._steps + 1 < self._accumulate:
            return super().backward(loss, tokens, trace)
        factor, parts = self.accumulator.add(tokens), len(self._buckets)
        divisor = self._begin()
        with trace.span("backward", tokens, parts):
            (loss if factor == divisor else loss * (factor / divisor)).backward()
        while len(self._waiting) > 1:
            self._give()
            with trace.span("backward", tokens, parts):
                pass  # all is computed; on a simulated clock it would be now

    def _begin(self) -> float:
        """By what gradients are divided to be the mean; the last one may still be to come."""
        self._begun = True
        divisor, self._weight = self.accumulator.take()
        if divisor != 1.0:
            self._flat.gradient.div_(divisor)
        self.exchange.prepare(self._flat.gradient, self._flat.parameters, self._weight)
        self._waiting.extend(self._buckets)
        self._missing = {bucket.start: bucket.stop - bucket.start for bucket in self._buckets}
        return divisor

    def _computed(self, place: slice) -> None:
        """The gradient of one parameter is there."""
        for bucket in self._waiting:
            self._missing[bucket.start] -= max(0, min(bucket.stop, place.stop) - max(bucket.start, place.start))
        while self._waiting and not self._missing[self._waiting[0].start]:
            self._give()

    def _give(self) -> None:
        self._background.give(self._flat.gradient[self._waiting.popleft()], self._weight)

    def _give_away(self) -> None:
        if not self._begun:  # its last step had no batch, or nobody knew that it was the last
            self._begin()
        while self._waiting:
            self._give()
        with self._trace.span("sync"):
            while self._background.under_way:
                _, joined = self._background.take()
        self._begun = False
        self._all_reduce.apply(self._flat.gradient, self._flat.parameters, joined)
