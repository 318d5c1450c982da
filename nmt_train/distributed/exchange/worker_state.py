"""The named vectors of a worker's state, and their conversion if the number of workers or the optimizer's place changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmt_train.optim.update_optimizers import OUTER

Vectors = dict[str, Tensor]
# What a worker owes: the part of its gradients (residual) or finished updates (unsent) that it has not sent.
RESIDUAL, UNSENT = "residual", "unsent"
LOCAL_STEPS = "local.steps"  # the number of local steps that a worker has made in total
OPTIMIZER = "optimizer."  # name prefix of the vectors of a worker's own optimizer
GLOBAL = ("parameters", "smoothed")  # the global parameters and their running mean


def optimizer_to_workers(
    vectors: Vectors, numbers: dict[str, Any], workers: Sequence[Vectors]
) -> tuple[Vectors, dict[str, Any], list[Vectors]]:
    """Give every worker a copy of the shards' optimizer state, if they have one.

    vectors: those of all shards, in full length. numbers: the optimizer's counters. workers: the state of each worker.
    Returns new versions of the three arguments.
    """
    staying = {name: vector for name, vector in vectors.items() if name in GLOBAL or name.startswith(OUTER)}
    mine = {name: vector for name, vector in vectors.items() if name not in staying}
    if not mine:
        return vectors, numbers, list(workers)
    steps = {name: torch.tensor([value]) for name, value in numbers["torch"].items()}
    moved = {OPTIMIZER + name: vector for name, vector in (mine | steps).items()}
    return staying, numbers | {"torch": {}}, [_without(state, OPTIMIZER) | moved for state in workers or [{}]]


def optimizer_to_shards(
    vectors: Vectors, numbers: dict[str, Any], workers: Sequence[Vectors]
) -> tuple[Vectors, dict[str, Any], list[Vectors]]:
    """Apply the workers' unsent updates, and give the shards the first worker's optimizer state if they have none.

    Arguments and results are those of `optimizer_to_workers`.
    """
    vectors = _without(vectors, OUTER)
    for state in workers:
        if UNSENT in state:
            vectors["parameters"] = vectors["parameters"] + state[UNSENT]
    others = [_without(state, UNSENT) for state in workers]
    theirs = {name.removeprefix(OPTIMIZER): v for name, v in (others or [{}])[0].items() if name.startswith(OPTIMIZER)}
    if theirs and not vectors.keys() - set(GLOBAL):
        counts = {name: float(v) for name, v in theirs.items() if v.shape != vectors["parameters"].shape}
        vectors |= {name: vector for name, vector in theirs.items() if name not in counts}
        numbers, others = numbers | {"torch": counts}, [_without(state, OPTIMIZER) for state in others]
    return vectors, numbers, others


def inherited(
    workers: Sequence[Vectors], rank: int, exchanging: Sequence[int], means: bool = False, trains: bool = True
) -> Vectors:
    """The state of worker `rank`, if a run with these worker states continues with another number of workers.

    exchanging: the ranks that exchange; they keep what they owe, and take over in turn what the other workers owe, including
    those that no longer exist.
    means: gradients are averaged, so a residual adds its share of one worker to each mean, as before. trains: False if it joins
    later, and so begins like a new worker.
    """
    if not workers:
        return {}
    mine = workers[rank % len(workers)] if trains or rank < len(workers) else {}
    if trains and not _optimizer_of(mine):  # it has not exchanged yet: use another worker's
        mine = mine | next((found for state in workers if (found := _optimizer_of(state))), {})
    mine = {name: vector for name, vector in mine.items() if name not in (RESIDUAL, UNSENT)}
    for name in (RESIDUAL, UNSENT):
        others = (old for old in range(len(workers)) if old not in exchanging)
        heirs = {old: exchanging[turn % len(exchanging)] for turn, old in enumerate(others)}
        from_ranks = [old for old in range(len(workers)) if heirs.get(old, old) == rank]
        owed = [workers[old][name] for old in from_ranks if name in workers[old]]
        if owed:
            mine[name] = owed[0] if len(owed) == 1 else torch.stack(owed).sum(0)
            if means and name == RESIDUAL and len(exchanging) != len(workers):
                mine[name] = mine[name] * (len(exchanging) / len(workers))
    return mine


def _optimizer_of(state: Vectors) -> Vectors:
    return {name: vector for name, vector in state.items() if name.startswith(OPTIMIZER)}


def _without(vectors: Vectors, prefix: str) -> Vectors:
    return {name: vector for name, vector in vectors.items() if not name.startswith(prefix)}
