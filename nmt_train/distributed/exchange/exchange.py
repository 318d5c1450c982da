"""Exchanges: how a worker communicates with servers or peers, and what an exchange can be combined with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.recovery_piece import RecoveryPiece
from nmt_train.distributed.exchange.worker_state import RESIDUAL, UNSENT, Vectors
from nmt_train.distributed.transport import Future
from nmt_train.optim.flat_model import cpu_copy
from nmt_train.optim.optimizer import Optimizer


class Completed:
    """A future whose value is already available."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self) -> Tensor:
        return self._value


class Exchange(ABC):
    """How a worker sends gradients and receives parameters; a subclass implements both.

    Class attributes say what an exchange can be combined with.
    section: the section of the configuration that has its settings.
    codec_needs: the attribute of `Codec` that must be true for the workers' codec; empty: none.
    synchronous: all workers exchange at the same step; no worker may take a step that the others do not take.
    sharded: each rank holds a shard of the parameters. solitary: the exchange is for a single rank.
    buckets: in how many parts a gradient is sent by default; 1: it cannot be sent in parts.
    late_residual: the residual changes when the update is complete, not when a message is encoded.

    optimizer: updates this rank's shard of the parameters, or all parameters if every rank holds them.
    initial_slices: for every rank, the slice of the parameters that it receives at the start.
    snapshot_slices: for every rank, the slice that it contributes to snapshots.
    waits_for_others: a worker waits until a number of other workers have sent their gradients.
    keeps: the parameters that a worker has received may differ from the global ones, so a snapshot must contain them, too.
    clips: the exchange clips the combined gradient; otherwise each worker clips its own.
    gradient_norm: the norm of the last gradient before clipping.
    exchanges_updates: workers exchange finished updates instead of gradients.
    most_unacknowledged: the maximum of `unacknowledged` when `give` returns.
    staleness: staleness[n] is the number of pushes computed on parameters n updates older than those of the shard.
    """

    section: ClassVar[str] = "replicas"
    codec_needs: ClassVar[str] = ""
    sharded: ClassVar[bool] = False
    solitary: ClassVar[bool] = False
    buckets: ClassVar[int] = 1
    late_residual: ClassVar[bool] = False
    synchronous: bool = False
    waits_for_others: bool = False
    keeps: bool = False
    clips: bool = False
    exchanges_updates: bool = False
    gradient_norm: float = 0.0
    most_unacknowledged: int = 0
    optimizer: Optimizer
    staleness: Counter[int]
    initial_slices: list[slice]
    snapshot_slices: list[slice]
    _carried_over: Vectors  # by name: loaded residual and unsent updates, which the next exchange includes

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.staleness = optimizer, Counter[int]()
        self._carried_over = {}

    @classmethod
    def build(cls, context: BuildContext) -> Exchange:
        """The configured exchange of a rank, perhaps inside a wrapper."""
        return cls(context)  # type: ignore[arg-type]  # subclasses are created from a context

    @property
    def updates(self) -> int:
        """The number of updates of the global parameters that this rank knows of."""
        return self.optimizer.updates

    def prepare(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        """Turn the gradient, in place, into what `sync` or `give` sends; does not change `parameters`, the worker's own.

        weight: the gradient's weight when it is combined with others (see gradient_accumulation.py); 0 if the worker had no
        batch, in which case the gradient is zero.
        """
        if weight:
            self._add_carried_over(RESIDUAL, gradient)

    @abstractmethod
    def sync(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        """Send the prepared gradient, and update `parameters` in place; both are flat vectors (elements,).

        parameters: what this worker last received. gradient: may be overwritten.
        """

    def begin(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> Callable[[], None]:
        """The first half of `sync`, which communicates, perhaps in a background task; the returned function is the second half.

        A synchronous exchange updates parameters only in the second half. Others may do so in the first.
        """
        self.sync(gradient, parameters, weight)
        return lambda: None

    def give(self, gradient: Tensor, weight: int = 1) -> None:
        """Send the prepared gradient, without updating the worker's parameters."""
        self.sync(gradient, self.optimizer.parameters, weight)

    @property
    def unacknowledged(self) -> int:
        """How many of the last calls of `give` may not have been applied yet."""
        return 0

    def fetch(self, parameters: Tensor) -> None:
        """Update `parameters`, without sending a gradient."""
        parameters.copy_(self.optimizer.parameters)

    def leave_round(self) -> None:
        """Announce that this worker sends nothing until its next `sync`, so that no other worker waits for it.

        Returns when its shards have accepted everything that this worker has sent.
        """
        return None

    @abstractmethod
    def refresh(self, parameters: Tensor) -> None:
        """Set `parameters` to exactly the global ones. Called while no worker has anything in flight."""

    def settle(self, parameters: Tensor) -> None:
        """Prepare for a snapshot: apply incomplete bundles of pushes, and make rounds wait for this worker again.

        Called while no worker has anything in flight. parameters: the worker's own. If `keeps`, neither they nor the shards'
        record of them change.
        """
        self.refresh(parameters)

    def knows(self, vectors: Mapping[str, Tensor]) -> bool:
        """Whether the saved worker state `vectors`, perhaps of another mode, contains everything that `restore` needs."""
        return True

    def restore(self, parameters: Tensor) -> None:
        """If `keeps`, called on resume instead of `refresh`: continue with `parameters`, the saved received ones."""
        raise AssertionError("only an exchange with `keeps` can restore")

    def copy(self) -> Future[Tensor]:
        """A future of the global parameters, or of their running mean if there is one, without stopping the workers.

        Different slices may come from different updates. The result may be this rank's own vector, which `sync` changes.
        """
        smoothed = self.optimizer.smoothed
        return Completed(self.optimizer.parameters if smoothed is None else smoothed)

    def snapshot(self) -> tuple[Vectors, dict[str, Any]]:
        """Copies of this rank's slice of the global parameters and of the optimizer's vectors; the optimizer's counters."""
        vectors, numbers = self.optimizer.everything()
        return {name: cpu_copy(vector) for name, vector in vectors.items()}, numbers

    def worker_state(self) -> Vectors:
        """The vectors (elements,) that this worker keeps between calls of `sync`: residuals, and its own optimizer's state."""
        return dict(self._carried_over)

    def load_worker_state(self, vectors: Mapping[str, Tensor]) -> None:
        """Continue with what `worker_state` returned on this rank, or with a state derived from other ranks' (`inherited`)."""
        owed = {name: vectors[name] for name in (RESIDUAL, UNSENT) if name in vectors}
        self._carried_over = {name: vector.to(self.optimizer.parameters) for name, vector in owed.items()}

    def recovery_pieces(self, rank: int) -> list[RecoveryPiece]:
        """The pieces of the global parameters that this rank holds now, `optimizer`'s first; rank: this rank's number."""
        return [RecoveryPiece.of(self.initial_slices[rank], self.optimizer)]

    def rescued(self) -> Vectors:
        """`worker_state` after an exchange that may have been interrupted, without vectors that must be equal on all ranks."""
        return self.worker_state()

    @property
    def _residual_name(self) -> str:
        """The name, in a worker's state, of what its messages have left out."""
        return UNSENT if self.exchanges_updates else RESIDUAL

    def contribution(self, vector: Tensor) -> Tensor:
        """What an unsent update of this rank will add to the global parameters; this is saved."""
        return vector

    def interrupted_contribution(self, vector: Tensor) -> Tensor:
        """The same for an interrupted exchange of `vector`: only the part that was encoded in its message."""
        return self.contribution(vector)

    def _add_carried_over(self, name: str, vector: Tensor) -> None:
        """Add the loaded vector `name`, if any, to `vector`, and forget it."""
        if name in self._carried_over:
            vector.add_(self._carried_over.pop(name))


def replicated(elements: int, ranks: int) -> tuple[list[slice], list[slice]]:
    """`initial_slices` and `snapshot_slices` if every rank holds all parameters; rank 0 contributes them to snapshots."""
    whole, none = slice(0, elements), slice(0, 0)
    return [whole] * ranks, [whole] + [none] * (ranks - 1)


class ExchangeWrapper(Exchange):
    """Wraps another exchange, and forwards to it whatever a subclass does not override."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.optimizer)
        self._exchange = exchange
        self.staleness, self.exchanges_updates = exchange.staleness, exchange.exchanges_updates
        self.initial_slices, self.snapshot_slices, self.waits_for_others = (
            exchange.initial_slices,
            exchange.snapshot_slices,
            exchange.waits_for_others,
        )
        self.keeps, self.most_unacknowledged = exchange.keeps, exchange.most_unacknowledged

    @property
    def updates(self) -> int:
        return self._exchange.updates

    @property
    def unacknowledged(self) -> int:
        return self._exchange.unacknowledged

    def prepare(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        self._exchange.prepare(gradient, parameters, weight)

    def give(self, gradient: Tensor, weight: int = 1) -> None:
        self._exchange.give(gradient, weight)

    def fetch(self, parameters: Tensor) -> None:
        self._exchange.fetch(parameters)

    def leave_round(self) -> None:
        self._exchange.leave_round()

    def refresh(self, parameters: Tensor) -> None:
        self._exchange.refresh(parameters)

    def settle(self, parameters: Tensor) -> None:
        self._exchange.settle(parameters)

    def knows(self, vectors: Mapping[str, Tensor]) -> bool:
        return self._exchange.knows(vectors)

    def restore(self, parameters: Tensor) -> None:
        self._exchange.restore(parameters)

    def copy(self) -> Future[Tensor]:
        return self._exchange.copy()

    def snapshot(self) -> tuple[Vectors, dict[str, Any]]:
        return self._exchange.snapshot()

    def worker_state(self) -> Vectors:
        return self._exchange.worker_state()

    def load_worker_state(self, vectors: Mapping[str, Tensor]) -> None:
        self._exchange.load_worker_state(vectors)

    def recovery_pieces(self, rank: int) -> list[RecoveryPiece]:
        return self._exchange.recovery_pieces(rank)

    def rescued(self) -> Vectors:
        return self._exchange.rescued()

    def contribution(self, vector: Tensor) -> Tensor:
        return self._exchange.contribution(vector)

    def interrupted_contribution(self, vector: Tensor) -> Tensor:
        return self._exchange.interrupted_contribution(vector)
