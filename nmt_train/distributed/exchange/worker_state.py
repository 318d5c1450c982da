"""The named vectors of a worker's state, and what becomes of them if workers or the place of the optimizer change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmt_train.optim.update_optimizers import OUTER

Vectors = dict[str, Tensor]
# What a worker still owes the others: gradients (residual) or finished updates (unsent).
RESIDUAL, UNSENT = "residual", "unsent"
OPTIMIZER = "optimizer."  # prefix of the names of a worker's own optimizer's vectors
GLOBAL = ("parameters", "smoothed")  # the global parameters and their running mean


def optimizer_to_workers(
    vectors: Vectors, numbers: dict[str, Any], workers: Sequence[Vectors]
) -> tuple[Vectors, dict[str, Any], list[Vectors]]:
    """Give every worker a copy of the optimizer that the shards had, if they had one.

    vectors: of the shards, in full length. numbers: the optimizer's counters. workers: the state of each worker. Returns the
    three with the optimizer moved.
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
    """Apply the updates that workers had not sent, and give the shards the first worker's optimizer if they had none.

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


def inherited(workers: Sequence[Vectors], rank: int, exchanging: Sequence[int]) -> Vectors:
    """The state of worker `rank`, if a run with these worker states continues with another number of workers.

    exchanging: the ranks that exchange; they also take over what workers owe that no longer exist or do not exchange.
    """
    if not workers:
        return {}
    mine = workers[rank % len(workers)]
    if not _optimizer_of(mine):  # it has not exchanged yet: use another worker's
        mine = mine | next((found for state in workers if (found := _optimizer_of(state))), {})
    mine = {name: vector for name, vector in mine.items() if name not in (RESIDUAL, UNSENT)}
    for name in (RESIDUAL, UNSENT):
        from_ranks = [old for old in range(len(workers)) if exchanging[old % len(exchanging)] == rank]
        owed = [workers[old][name] for old in from_ranks if name in workers[old]]
        if owed:
            mine[name] = owed[0] if len(owed) == 1 else torch.stack(owed).sum(0)
    return mine


def _optimizer_of(state: Vectors) -> Vectors:
    return {name: vector for name, vector in state.items() if name.startswith(OPTIMIZER)}


def _without(vectors: Vectors, prefix: str) -> Vectors:
    return {name: vector for name, vector in vectors.items() if not name.startswith(prefix)}
