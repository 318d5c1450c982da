"""The memory of a rank's vectors is counted on simulated ranks, whose vectors have no values."""

from __future__ import annotations

import pytest
import torch
from conftest import Make
from virtual import cluster

from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.optimizer import Optimizer
from nmt_train.optim.torch_optimizers import OPTIMIZERS, STATE_VECTORS
from nmt_train.simulation.memory import held
from nmt_train.simulation.timing import measure

ELEMENTS = 40_000


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_is_as_large_as_it_says(name: str) -> None:
    parameters = torch.ones(10)
    optimizer = Optimizer(OptimizerConfig(name=name), parameters)
    for _ in range(2):
        optimizer.apply(torch.ones(10))
    assert len(optimizer.state()[0]) == STATE_VECTORS[name]
    assert held([optimizer, parameters]) >= 4 * 10 * (1 + STATE_VECTORS[name])


@pytest.mark.parametrize(
    ("mode", "nodes", "vectors"),
    [
        ("single", [1], 4.0),  # parameters, gradient, two moments of Adam
        ("sync", [1, 1, 1, 1], 4.0),
        ("vanilla", [1, 1, 1, 1], 2 + 0.5 + 0.5),  # and a quarter of the global parameters, a gradient, two moments
        ("local-sgd", [1, 1, 1, 1], 6.0),  # and what the worker started from, and the replica of all ranks
    ],
)
def test_a_rank_holds_the_vectors_that_its_mode_needs(make: Make, mode: str, nodes: list[int], vectors: float) -> None:
    timing = measure(make(mode=mode, local__every=3), cluster(nodes), [(ELEMENTS,)], [10, 20], 8)
    assert timing.ranks[0].memory / (4 * ELEMENTS) == pytest.approx(vectors, abs=0.01)
