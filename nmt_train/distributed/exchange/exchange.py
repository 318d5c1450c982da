"""With whom a worker exchanges: what every exchange does, and what it can be combined with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.recovery_piece import RecoveryPiece
from nmt_train.distributed.transport import Future
from nmt_train.optim.optimizer import Optimizer

Vectors = dict[str, Tensor]
# What a worker still owes the others, by its name among the vectors that it carries: gradients, or finished updates.
RESIDUAL, UNSENT = "residual", "unsent"
OPTIMIZER = "optimizer."  # begins the names of the vectors of its own optimizer


class Completed:
    """A future that is done."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self) -> Tensor:
        return self._value


class Exchange(ABC):
    """With whom a worker exchanges. A subclass says how gradients are given away and parameters come back.

    What can be combined with it: codec_needs: the attribute that codecs must have (see `Codec`), or nothing. synchronous: all
    workers exchange at the same step, so that none may take a step that the others do not. sharded: ranks hold shards of the
    parameters. solitary: for a rank that is alone. in_parts: parts of a gradient may travel separately.

    `optimizer` serves this rank's shard of the parameters: all of them where every rank has all.
    given, kept: of every rank the part of the parameters that it is handed at the start, and the part that it has in snapshots.
    in_rounds: workers wait for a number of others.
    keeps: what a worker has received differs from the global parameters, so that it and the shards remember it.
    clips: gradients are clipped when they have been joined; else a worker clips its own. gradient_norm: of the last, before.
    at_worker: `prepare` makes finished updates of gradients.
    staleness: how many pushes met parameters that were so many updates older than the worker's.
    """

    codec_needs: ClassVar[str] = ""
    sharded: ClassVar[bool] = False
    solitary: ClassVar[bool] = False
    in_parts: ClassVar[bool] = False
    synchronous: bool = False
    waits_for_others: bool = False
    keeps: bool = False
    clips: bool = False
    exchanges_updates: bool = False
    gradient_norm: float = 0.0
    optimizer: Optimizer
    staleness: Counter[int]
    initial_slices: list[slice]
    snapshot_slices: list[slice]
    _owed: Vectors  # by name, what other modes and layouts had not sent yet

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.staleness = optimizer, Counter[int]()
        self._owed = {}

    @classmethod
    def build(cls, context: BuildContext) -> Exchange:
        """The exchange of a rank, as configured."""
        raise NotImplementedError

    @property
    def updates(self) -> int:
        """Updates of the global parameters, as far as this rank knows."""
        return self.optimizer.updates

    def prepare(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        """Make what is to be given away of the gradient, in place; `parameters` are the worker's, and stay as they are.

        weight: how much it counts where it is joined with others (see joining.py); 0 where there was no batch, so that all of
        it is zero.
        """
        if weight:
            self._pay(RESIDUAL, gradient)

    @abstractmethod
    def sync(self, gradient: Tensor, parameters: Tensor, weight: int = 1) -> None:
        """Give away what was prepared and bring `parameters` up to date; both flat (elements,), in place.

        `parameters` are what this worker last received, and `gradient` may be overwritten.
        """

    def give(self, gradient: Tensor, weight: int = 1) -> None:
        """Only give away what was prepared."""
        self.sync(gradient, self.optimizer.parameters, weight)

    def fetch(self, parameters: Tensor) -> None:
        """Only bring `parameters` up to date."""
        parameters.copy_(self.optimizer.parameters)

    def leave_round(self) -> None:
        """Nothing more will come from this worker until its next `sync`: nobody should wait for it.

        Returns when all that it gave away has been applied.
        """
        return None

    @abstractmethod
    def refresh(self, parameters: Tensor) -> None:
        """Bring `parameters` to exactly the global ones, while no worker has anything under way."""

    def settle(self, parameters: Tensor) -> None:
        """Before a snapshot, while no worker has anything under way: apply what waits for more, and expect this worker again.

        `parameters` are the worker's; they and what is known of them stay as they are, where `keeps`.
        """
        self.refresh(parameters)

    def knows(self, vectors: Mapping[str, Tensor]) -> bool:
        """Whether what a worker carried, perhaps in another mode or layout, says all that `restore` needs."""
        return True

    def restore(self, parameters: Tensor) -> None:
        """Instead of `refresh`, where `keeps`: go on with what the worker had received when it was saved."""
        raise AssertionError("only an exchange that keeps has something to restore")

    def copy(self) -> Future[Tensor]:
        """The global parameters, or their running mean if there is one, about as they are now; nobody waits for that.

        Where the vector is this rank's own, it may change with the next `sync`.
        """
        smoothed = self.optimizer.smoothed
        return Completed(self.optimizer.parameters if smoothed is None else smoothed)

    def snapshot(self) -> tuple[Vectors, dict[str, Any]]:
        """Copies of this rank's part of the global parameters with all that the optimizer has, and its numbers."""
        vectors, numbers = self.optimizer.everything()
        return {name: vector.clone() for name, vector in vectors.items()}, numbers

    def worker_state(self) -> Vectors:
        """What this worker keeps from one `sync` to the next, as vectors (elements,): residuals, its own optimizer."""
        return dict(self._owed)

    def load_worker_state(self, vectors: Mapping[str, Tensor]) -> None:
        """Go on with what `carried` gave, here or, re-cut or added up, elsewhere."""
        owed = {name: vectors[name] for name in (RESIDUAL, UNSENT) if name in vectors}
        self._owed = {name: vector.to(self.optimizer.parameters) for name, vector in owed.items()}

    def recovery_pieces(self, rank: int) -> list[RecoveryPiece]:
        """What this rank (its number is `rank`) has of the global parameters, this moment: first what `optimizer` has."""
        return [RecoveryPiece.of(self.initial_slices[rank], self.optimizer)]

    def rescued(self) -> Vectors:
        """`carried`, where an exchange may have been cut short: without what all ranks must have alike."""
        return self.worker_state()

    def _pay(self, name: str, vector: Tensor) -> None:
        """Add what is owed by that name."""
        if name in self._owed:
            vector.add_(self._owed.pop(name))


class ExchangeWrapper(Exchange):
    """An exchange around another one, which does all that a subclass does not."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.optimizer)
        self._exchange = exchange
        self.staleness, self.exchanges_updates = exchange.staleness, exchange.exchanges_updates
        self.initial_slices, self.snapshot_slices, self.waits_for_others = (
            exchange.initial_slices,
            exchange.snapshot_slices,
            exchange.waits_for_others,
        )
        self.keeps = exchange.keeps

    @property
    def updates(self) -> int:
        return self._exchange.updates

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
