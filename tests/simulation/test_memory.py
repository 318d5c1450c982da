"""The memory of a rank's vectors is counted on simulated ranks, whose vectors have no values."""

from __future__ import annotations

import pytest
import torch
from conftest import Make
from virtual import cluster

from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.optimizer import Optimizer
from nmt_train.optim.torch_optimizers import OPTIMIZERS
from nmt_train.simulation.memory import held
from nmt_train.simulation.timing import measure

ELEMENTS = 40_000


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_counts_before_it_is_allocated(name: str) -> None:
    real = Optimizer(OptimizerConfig(name=name), torch.ones(1000))
    real.apply(torch.ones(1000))
    sized = Optimizer(OptimizerConfig(name=name), torch.ones(1000, device="meta"))
    assert held(sized) == 4 * 1000 * (1 + len(real.state()[0]))


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_the_codecs_of_all_shares_have_the_same_scratch(make: Make, nodes: int) -> None:
    """Three vectors of the largest share, besides parameters, gradient, two moments and two residuals."""
    config = make(mode="low-bit", replicas__buckets=1, model__tied="none")
    timing = measure(config, cluster([1] * nodes), [(40, 100), (7,), (300, 100), (10, 593)], [10, 20], 8)
    assert timing.ranks[0].memory / (4 * timing.elements) == pytest.approx(6 + 3 / nodes, abs=0.05)


@pytest.mark.parametrize(
    ("mode", "nodes", "vectors"),
    [
        ("single", [1], 4.0),  # parameters, gradient, two moments of Adam
        ("sync", [1, 1, 1, 1], 4.0),
        ("vanilla", [1, 1, 1, 1], 2 + 0.5 + 0.5),  # and a quarter of the global parameters, a gradient, two moments
        ("local-sgd", [1, 1, 1, 1], 6.0),  # and what the worker started from, and the replica of all ranks
        ("diloco", [1, 1, 1, 1], 7.0),  # and the outer momentum
    ],
)
def test_a_rank_holds_the_vectors_that_its_mode_needs(make: Make, mode: str, nodes: list[int], vectors: float) -> None:
    timing = measure(make(mode=mode, local__every=3), cluster(nodes), [(ELEMENTS,)], [10, 20], 8)
    assert timing.ranks[0].memory / (4 * ELEMENTS) == pytest.approx(vectors, abs=0.01)
