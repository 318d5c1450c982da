"""What a worker keeps from one exchange to the next, and how it changes with the number of workers or the optimizer's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from nmt_train.optim.update_optimizers import OUTER

Vectors = dict[str, Tensor]
GLOBAL = ("parameters", "smoothed")  # the global parameters and their running mean
_WHOLE = ("received", "residual", "unsent")  # fields of a `WorkerState` that are one vector
_NAMED = ("optimizer", "own", "group")  # those that are several


@dataclass
class WorkerState:
    """received: the parameters (elements,) that a worker last received, if they may differ from the global ones.
    residual: the part of its gradients that the worker has not sent yet; unsent: the part of its finished updates (elements,).
    optimizer: the state of its own optimizer, if it computes updates (see `Optimizer.packed`). own: what else its strategy
    keeps. group: what has a meaning only among the same ranks.
    """

    received: Tensor | None = None
    residual: Tensor | None = None
    unsent: Tensor | None = None
    optimizer: Vectors = field(default_factory=dict)
    own: Vectors = field(default_factory=dict)
    group: Vectors = field(default_factory=dict)

    def vectors(self) -> Vectors:
        """All vectors, by the names that they have in messages and checkpoints."""
        whole = {name: vector for name in _WHOLE if (vector := getattr(self, name)) is not None}
        return whole | {f"{kind}.{name}": vector for kind in _NAMED for name, vector in getattr(self, kind).items()}

    @classmethod
    def of(cls, vectors: Mapping[str, Tensor]) -> WorkerState:
        """The reverse of `vectors`; other names are ignored."""
        state = cls(vectors.get("received"), vectors.get("residual"), vectors.get("unsent"))
        for name, vector in vectors.items():
            kind, _, inner = name.partition(".")
            if kind in _NAMED:
                getattr(state, kind)[inner] = vector
        return state

    def each(self, change: Callable[[Tensor], Tensor]) -> WorkerState:
        """A state of changed vectors."""
        return WorkerState.of({name: change(vector) for name, vector in self.vectors().items()})

    def of_survivor(self) -> WorkerState:
        """Without what must be equal on all ranks: survivors continue from the same parameters."""
        return replace(self, received=None, group={})

    def plus(self, other: WorkerState) -> WorkerState:
        """With the residual and the unsent updates of another state, too."""
        return replace(self, residual=_sum(self.residual, other.residual), unsent=_sum(self.unsent, other.unsent))

    def clear(self) -> None:
        """Forget all vectors, to free their memory."""
        for its in fields(self):
            setattr(self, its.name, None if its.name in _WHOLE else {})


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first if second is None else first + second


def optimizer_to_workers(
    vectors: Vectors, numbers: dict[str, Any], workers: Sequence[WorkerState]
) -> tuple[Vectors, dict[str, Any], list[WorkerState]]:
    """Give every worker a copy of the shards' optimizer state, if they have one.

    vectors: those of all shards, in full length. numbers: the optimizer's counters. workers: the state of each worker.
    Returns new versions of the three arguments.
    """
    staying = {name: vector for name, vector in vectors.items() if name in GLOBAL or name.startswith(OUTER)}
    moved = {name: vector for name, vector in vectors.items() if name not in staying}
    if not moved:
        return vectors, numbers, list(workers)
    moved |= {name: torch.tensor([value]) for name, value in numbers["torch"].items()}
    return staying, numbers | {"torch": {}}, [replace(state, optimizer=dict(moved)) for state in workers or [WorkerState()]]


def optimizer_to_shards(
    vectors: Vectors, numbers: dict[str, Any], workers: Sequence[WorkerState]
) -> tuple[Vectors, dict[str, Any], list[WorkerState]]:
    """Apply the workers' unsent updates, and give the shards the first worker's optimizer state if they have none.

    Arguments and results are those of `optimizer_to_workers`.
    """
    vectors = {name: vector for name, vector in vectors.items() if not name.startswith(OUTER)}
    for state in workers:
        if state.unsent is not None:
            vectors["parameters"] = vectors["parameters"] + state.unsent
    others = [replace(state, unsent=None) for state in workers]
    first = others[0].optimizer if others else {}
    if first and not vectors.keys() - set(GLOBAL):
        counts = {name: float(v) for name, v in first.items() if v.shape != vectors["parameters"].shape}
        vectors |= {name: vector for name, vector in first.items() if name not in counts}
        numbers, others = numbers | {"torch": counts}, [replace(state, optimizer={}) for state in others]
    return vectors, numbers, others


def inherited(
    workers: Sequence[WorkerState], rank: int, exchanging: Sequence[int], means: bool = False, trains: bool = True
) -> WorkerState:
    """The state of worker `rank`, if a run with these worker states continues with another number of workers.

    exchanging: the ranks that exchange; they keep what they owe, and take over in turn what the other workers owe, including
    those that no longer exist.
    means: gradients are averaged, so a residual adds its share of one worker to each mean, as before. trains: False if it joins
    later, and so begins like a new worker.
    """
    if not workers:
        return WorkerState()
    mine = workers[rank % len(workers)] if trains or rank < len(workers) else WorkerState()
    if trains and not mine.optimizer:  # it has not exchanged yet: use another worker's
        mine = replace(mine, optimizer=next((dict(state.optimizer) for state in workers if state.optimizer), {}))
    others = (old for old in range(len(workers)) if old not in exchanging)
    heirs = {old: exchanging[turn % len(exchanging)] for turn, old in enumerate(others)}
    inherits_from = [state for old, state in enumerate(workers) if heirs.get(old, old) == rank]
    residual = _total([state.residual for state in inherits_from])
    if residual is not None and means and len(exchanging) != len(workers):
        residual = residual * (len(exchanging) / len(workers))
    return replace(mine, residual=residual, unsent=_total([state.unsent for state in inherits_from]))


def _total(vectors: Sequence[Tensor | None]) -> Tensor | None:
    there = [vector for vector in vectors if vector is not None]
    if len(there) < 2:
        return there[0] if there else None
    return torch.stack(there).sum(0)
