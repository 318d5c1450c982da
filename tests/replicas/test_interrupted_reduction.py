"""Reducers that compress a vector in parts: an exchange that breaks off between two parts changes no residual."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from virtual import engine, together

from nmt_train.codec.dense import Dense
from nmt_train.replicas.low_bit import LowBitReducer
from nmt_train.replicas.powersgd import LowRankReducer
from nmt_train.replicas.ring import RingAllReduce
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.strategy.config import LowBitConfig, LowRankConfig
from nmt_train.trace import Trace

LAYOUT = [("weight", (12, 9)), ("bias", (7,)), ("other", (4, 3, 5)), ("small", (2, 2))]
LIKE = torch.zeros(12 * 9 + 7 + 60 + 4)


def low_bit(transport: VirtualTransport) -> LowBitReducer:
    return LowBitReducer(transport, LAYOUT, LowBitConfig(), LIKE, Trace(False, transport))


def low_rank(transport: VirtualTransport) -> LowRankReducer:
    trace = Trace(False, transport)
    return LowRankReducer(RingAllReduce(transport, Dense(), trace), LAYOUT, LowRankConfig(1), LIKE, trace, transport)


@pytest.mark.parametrize("make", [low_bit, low_rank])
def test_an_exchange_that_was_interrupted_between_two_parts_leaves_the_residual_as_it_was(
    make: Callable[[VirtualTransport], LowBitReducer | LowRankReducer],
) -> None:
    def reduce(transport: VirtualTransport) -> tuple[Tensor, Tensor]:
        made, residuals = make(transport), []
        torch.manual_seed(transport.rank)
        for update, parts in enumerate((2, 1)):  # the second exchange has only one of its two parts
            for part in made.parts(LIKE.numel(), 2)[:parts]:
                made.reduce(torch.randn(part.stop - part.start), update, 1, part.start)
            residuals.append(made.residual.clone())
        return residuals[0], residuals[1]

    for before, after in together(engine([1, 1]), reduce, reduce):
        assert before.any()
        assert torch.equal(before, after)
