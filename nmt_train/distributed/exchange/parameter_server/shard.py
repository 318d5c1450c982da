"""A shard: a slice of the global parameters with its optimizer, and what each worker has of it (thesis Algorithms 2, 7, 9)."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import torch
from torch import Tensor

from nmt_train.distributed.codec.codec import Codec
from nmt_train.distributed.exchange.parameter_server.update_rules import UpdateRule
from nmt_train.distributed.message import Message
from nmt_train.optim.flat_model import subtract
from nmt_train.optim.optimizer import Optimizer


class Shard:
    """Not safe for several tasks at once: callers hold `lock` of the server.

    up decodes pushes. down encodes deltas against what each worker has, so that what one delta leaves out is in the next;
    None: workers are sent the parameters themselves. delay: answers that a worker got since the one that its gradient is of.
    knows_own: pushes are updates, and a worker has applied its own before it pushes them: deltas are what others did. sums:
    pushes for one update are added up; else the update is by their mean, each counting by its weight (see joining.py).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        up: Codec,
        down: Codec | None,
        rule: UpdateRule,
        delay: int = 0,
        knows_own: bool = False,
        sums: bool = False,
    ) -> None:
        self.optimizer, self.staleness = optimizer, Counter[int]()
        self._up, self._down, self._rule = up, down, rule
        self.knows_own = knows_own and down is not None
        self._parameters = optimizer.parameters
        self._gradient = torch.zeros_like(self._parameters)
        self._sums = sums and not rule.mean
        self._shares: list[float] = []  # of the pushes in _gradient, which are not yet applied: how much of a step each is
        self._weights: list[int] = []  # of the same pushes
        self._held: dict[int, Tensor] = {}
        self._expected: set[int] = set()  # workers that do not rest
        self._waiting: list[int] = []  # workers whose answers the rule holds
        # The updates that each worker's last answers held; the first is that of the parameters which its gradient is of.
        self._seen: dict[int, deque[int]] = defaultdict(lambda: deque([0], maxlen=delay + 1))

    def push(self, worker: int, message: Message, answer: bool = True, weight: int = 1) -> list[int]:
        """Take a worker's gradient and update, or wait for others; which workers are to be answered now."""
        if self.knows_own:
            self._up.add(message, self._held[worker])
        if (share := self._share(worker)) is None:
            return [worker] if answer else []
        if self._weights:
            self._up.add(message, self._gradient, self._scale(share, weight))
        else:
            self._up.decode(message, self._gradient)
        return self._pushed(worker, self._gradient, answer, share, weight)

    def push_directly(self, worker: int, gradient: Tensor, weight: int = 1) -> list[int]:
        """The same with the gradient itself, which may be overwritten."""
        if (share := self._share(worker)) is None:
            return [worker]
        if not self._weights and self._rule.due(1, len(self._expected)):
            return self._pushed(worker, gradient, True, share, weight)
        if self._weights:
            self._gradient.add_(gradient, alpha=self._scale(share, weight))
        else:
            self._gradient.copy_(gradient)
        return self._pushed(worker, self._gradient, True, share, weight)

    def _scale(self, share: float, weight: int) -> float:
        """By how much a further push counts; the first one counts when there is a second, and is exact if it stays alone."""
        if len(self._weights) == 1 and (first := self._counted()[0]) != 1.0:
            self._gradient.mul_(first)
        return share * (1 if self._sums else max(1, weight))

    def _counted(self) -> list[float]:
        """By how much each push counts."""
        if self._sums:
            return list(self._shares)
        return [share * weight for share, weight in zip(self._shares, self._weights, strict=True)]

    def leave_round(self, worker: int) -> list[int]:
        """Do not wait for this worker until it pushes again; which workers are to be answered now."""
        self._expected.discard(worker)
        return self._update_if_due(self._gradient)

    def _share(self, worker: int) -> float | None:
        """Count a push; how much of a step it is worth, or None if it comes too late."""
        self._expected.add(worker)
        staleness = self.optimizer.updates - self._seen[worker][0]
        self.staleness[staleness] += 1
        return None if self._rule.late(staleness) else self._rule.share(staleness)

    def _pushed(self, worker: int, gradient: Tensor, answer: bool, share: float, weight: int) -> list[int]:
        self._shares.append(share)
        self._weights.append(max(1, weight))
        if answer and self._rule.holds:
            self._waiting.append(worker)
        now = self._update_if_due(gradient)
        return now if self._rule.holds or not answer else [worker]

    def _update_if_due(self, gradient: Tensor) -> list[int]:
        if self._weights and self._rule.due(len(self._weights), len(self._expected)):
            self._apply(gradient)
            now, self._waiting = self._waiting, []
            return now
        return []

    def answer(self, worker: int) -> Message:
        """What brings the worker up to date, as far as the codec sends it, after the number of updates."""
        updates = self.optimizer.updates
        self._seen[worker].append(updates)
        if self._down is None:
            return Message((updates,), (self._parameters.clone(),))
        held = self._held[worker]
        message = self._down.encode(subtract(self._parameters, held, out=torch.empty_like(held)), updates)
        self._down.add(message, held)
        return message.and_numbers(updates)

    @property
    def cost_elements(self) -> int:
        """How many elements making an answer goes through (see `Codec.effort`)."""
        return 0 if self._down is None else self._down.cost_elements(self._parameters.numel())

    def copy_to(self, worker: int, parameters: Tensor) -> None:
        """The answer for a worker of the same rank."""
        self._seen[worker].append(self.optimizer.updates)
        parameters.copy_(self._parameters)

    def pull(self, worker: int, pushes: bool = True) -> Message:
        """The parameters as they are, with what waits for its bundle applied; the worker has all of them from now on.

        pushes: whether it will push gradients.
        """
        self.flush()
        if pushes:
            self.expect(worker)
        self._seen[worker].clear()
        self._seen[worker].append(self.optimizer.updates)
        if self._down is not None:
            self._held[worker] = self._parameters.clone()
        return Message((self.optimizer.updates,), (self._parameters.clone(),))

    def expect(self, worker: int) -> None:
        """Rounds wait for this worker from now on, although it has not pushed yet."""
        self._expected.add(worker)

    def has(self, worker: int, parameters: Tensor) -> None:
        """A worker comes with parameters that it has received before."""
        if worker not in self._seen:
            self._seen[worker].clear()
            self._seen[worker].append(self.optimizer.updates)
        if self._down is not None:
            self._held[worker] = parameters.to(self._parameters, copy=True)

    def seen(self, workers: int) -> Tensor:
        """The updates that each worker's last answers held (workers, answers), int64; where there were fewer, -1."""
        longest = max((len(its) for its in self._seen.values()), default=0)
        rows = [list(self._seen[worker]) if worker in self._seen else [] for worker in range(workers)]
        return torch.tensor([[-1] * (longest - len(row)) + row for row in rows], dtype=torch.int64)

    def load_seen(self, table: Tensor) -> None:
        """Continue with what `seen` gave."""
        for worker, updates in enumerate(table.tolist()):
            if updates and updates[-1] >= 0:
                self._seen[worker].clear()
                self._seen[worker].extend(number for number in updates if number >= 0)

    def flush(self) -> bool:
        """Update with a bundle that is not full; whether there was one."""
        if self._weights:
            self._apply(self._gradient)
            return True
        return False

    def _apply(self, gradient: Tensor) -> None:
        """One step by what was pushed, each push counting by its weight and its share of a step.

        A step is as long as the mean of the shares; the gradient is the mean that they weight, so that for plain descent each
        push moves the parameters by its share (Zhang et al. 2016, section 3.2), whatever the optimizer makes of the scale.
        """
        counted, pushes = self._counted(), len(self._weights)
        share = sum(counted) / (pushes if self._sums else sum(self._weights))
        factor = (pushes if self._sums else 1) / sum(counted)
        self._shares, self._weights = [], []
        if pushes > 1 and factor != 1.0:
            gradient.mul_(factor)
        self.optimizer.apply(gradient, share)
