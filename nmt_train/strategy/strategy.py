"""A strategy turns a worker's gradients into new parameters, together with the other ranks.

There is one family of strategies per package or module: `replicas/` (every rank has all parameters), `server/` (a sharded
parameter server), strom.py (peers) and alone.py (one rank).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter

from torch import Tensor

from nmt_train.common.errors import NotFinite
from nmt_train.optim.gradient_accumulation import GradientAccumulator
from nmt_train.optim.optimizer import Clipping, Optimizer
from nmt_train.strategy.context import BuildContext
from nmt_train.strategy.recovery_piece import RecoveryPiece
from nmt_train.strategy.state import WorkerState
from nmt_train.transport import Future

MOST_UNACKNOWLEDGED = 2  # pushes per shard that may be unacknowledged; see `Strategy.unsettled`


class Strategy(ABC):
    """Unless a subclass says otherwise, it exchanges after every step, or every `batch.accumulate` steps.

    optimizer: updates what this rank holds of the global parameters: a shard, or all. slices: for every rank, what it holds.
    gradient_norm: of the last gradient before clipping. steps: steps[n] exchanges covered n steps each.
    staleness: staleness[n] pushes were computed on parameters n updates older than those of the shard.
    max_in_flight: how many exchanges may be in flight when `step` returns, and thus while the next gradient is computed.
    """

    max_in_flight: int = 0

    def __init__(self, context: BuildContext, optimizer: Optimizer, slices: list[slice]) -> None:
        self.optimizer, self.slices = optimizer, slices
        self.gradient_norm, self.steps, self.staleness = 0.0, Counter[int](), Counter[int]()
        self.accumulator = GradientAccumulator(context.plan.sums)
        self._flat, self._trace = context.flat, context.trace
        self._clipping = Clipping.of(context.plan.optimizer, self._flat.gradient.numel(), self._flat.matrices())
        self._rank, self._accumulate = context.transport.rank, context.plan.accumulate
        self._accumulated = 0  # steps whose gradients have not been exchanged
        # What the worker owes from a loaded state, perhaps of another mode, until an exchange includes it: a residual of
        # gradients, and an unsent update of parameters.
        self._debt = WorkerState()
        self._debt_included = False  # in the gradient or change that is exchanged now

    @property
    def updates(self) -> int:
        """The number of updates of the global parameters that this rank knows of."""
        return self.optimizer.updates

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last update that the worker knows of."""
        return self.optimizer.learning_rate

    @property
    def mid_series(self) -> bool:
        """Whether the next step continues a sum of gradients, or a series of local steps, that earlier steps have begun."""
        return self._accumulated > 0

    @property
    def unsettled(self) -> int:
        """How many exchanges before the present one may be lost if ranks end; at most `max_in_flight` + MOST_UNACKNOWLEDGED."""
        return self.max_in_flight

    def backward(self, loss: Tensor, tokens: int) -> None:
        """Add a batch's gradient to the flat gradient, parts of which may be sent as soon as they are complete.

        tokens: the number of target tokens in the batch.
        """
        factor = self.accumulator.add(tokens)
        with self._trace.span("backward", tokens):
            self._flat.backward(loss if factor == 1.0 else loss * factor)

    def step(self) -> bool:
        """Called after a batch's gradient was added to the flat one; returns True if it has exchanged gradients.

        A pipeline returns True if it has applied an older sum. Raises NotFinite if the gradient is not finite. The gradient is
        then dropped; training can continue with the next batch.
        """
        self._accumulated += 1
        if self._accumulated < self._accumulate:
            return False
        self._exchange_accumulated()
        return True

    def skip(self) -> bool:
        """Called instead of `step` if this worker had no batch but other workers had one."""
        return self.step()

    def drain(self) -> None:
        """Exchange what has accumulated, and finish everything in flight: before a snapshot, and at the end of training."""
        if self._accumulated:
            self._exchange_accumulated()

    def _exchange_accumulated(self) -> None:
        steps, self._accumulated = self._accumulated, 0
        try:
            self._exchange()
            self._pay_debt()
        except NotFinite:  # dropped; the next gradient includes the debt
            self._debt_included = False
            raise
        finally:
            self._flat.gradient.zero_()
        self.steps[steps] += 1

    @abstractmethod
    def _exchange(self) -> None:
        """Exchange the flat gradient, which may be overwritten, and update the parameters of the model."""

    @abstractmethod
    def refresh(self) -> None:
        """Copy exactly the global parameters to this worker. Called while every worker is drained."""

    def prepare_snapshot(self) -> None:
        """Called while every worker is drained, before `piece` and `state`."""
        self.refresh()

    def resume(self) -> None:
        """Begin to train, after `load` on all ranks: with the worker's parameters if the state had them, else `refresh`."""
        self.refresh()

    def copy(self) -> Future[Tensor]:
        """A future of the global parameters, or of their running mean if there is one, without stopping the workers.

        Different slices may come from different updates. The result may be this rank's own vector, which `step` changes.
        """
        smoothed = self.optimizer.smoothed
        return Completed(self.optimizer.parameters if smoothed is None else smoothed)

    def piece(self) -> RecoveryPiece:
        """A copy of what this rank holds of the global parameters."""
        return RecoveryPiece.of(self.slices[self._rank], self.optimizer)

    def pieces(self) -> list[RecoveryPiece]:
        """After other ranks have ended: `piece`, and what else this rank knows of the global parameters."""
        return [self.piece()]

    def state(self) -> WorkerState:
        """What this worker keeps from one exchange to the next, perhaps after an interrupted exchange."""
        return self._debt

    def rescue(self) -> tuple[WorkerState, WorkerState]:
        """After other ranks have ended, perhaps during an exchange: what this worker continues with, in two parts.

        It keeps the first part in any case. The second part is what the interrupted exchange may have sent. If another rank has
        completed that update, the update includes the second part, which must not be sent again; otherwise, this worker keeps
        the second part, too.
        """
        return self.state().of_survivor(), WorkerState()

    def load(self, state: WorkerState) -> None:
        """Continue from what `state` returned on this rank, or from one derived from those of other ranks (`inherited`)."""
        like = self.optimizer.parameters
        self._debt = WorkerState(residual=_moved(state.residual, like), unsent=_moved(state.unsent, like))

    def _add_debt(self, gradient: Tensor, weight: int) -> None:
        """Add a loaded residual to a gradient. weight: of the gradient; 0 if there was no batch, so that it stays zero."""
        if weight and self._debt.residual is not None:
            gradient[: self._debt.residual.numel()].add_(self._debt.residual)
            self._debt_included = True

    def _pay_debt(self) -> None:
        """The gradient that includes the debt is applied: it is not owed any more."""
        if self._debt_included:
            self._debt.residual, self._debt_included = None, False


def _moved(vector: Tensor | None, like: Tensor) -> Tensor | None:
    return None if vector is None else vector.to(like)


class Completed:
    """A future whose value is already available."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self) -> Tensor:
        return self._value
