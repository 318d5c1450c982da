"""A shard: a slice of the global parameters, its optimizer, and each worker's version of it (thesis Algorithms 2, 7, 9)."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import torch
from torch import Tensor

from nmt_train.codec.codec import Codec
from nmt_train.codec.dense import Dense
from nmt_train.common.message import Message
from nmt_train.optim.flat_model import subtract
from nmt_train.optim.optimizer import Optimizer
from nmt_train.strategy.update_rules import UpdateRule


class Shard:
    """Not thread-safe: callers hold the lock of the `ShardService`.

    up: the codec that decodes pushes.
    down: the codec that encodes deltas against the shard's record of what each worker has, so that the next delta contains
    what one leaves out. None: the shard sends the parameters themselves.
    delay: see `Traffic`.
    knows_own: pushes are updates that the worker has already applied to its copy, so deltas contain only others' updates.
    sums: an update uses the sum of its pushes; otherwise their mean by weight (see gradient_accumulation.py).
    near: workers that exchange with this shard in full precision (thesis 4.2.2: those of its own machine).
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
        near: frozenset[int] = frozenset(),
    ) -> None:
        self.optimizer, self.staleness = optimizer, Counter[int]()
        self._up, self._down, self._rule, self._near = up, down, rule, near
        self._knows_own = knows_own
        self._parameters = optimizer.parameters
        self._gradient = torch.zeros_like(self._parameters)
        self._sums = sums and not rule.mean
        self._shares: list[float] = []  # for each push accumulated in _gradient: its fraction of a step
        self._weights: list[int] = []  # the weights of the same pushes
        self._held: dict[int, Tensor] = {}  # by worker: the parameters that it has, if `down` encodes deltas
        self._expected: set[int] = set()  # workers that rounds wait for
        self._waiting: list[int] = []  # workers whose answers the update rule delays
        # By worker: the update counts of its last answers. The oldest is that of the parameters of its next push.
        self._seen: dict[int, deque[int]] = defaultdict(lambda: deque([0], maxlen=delay + 1))

    def push(self, worker: int, message: Message, answer: bool = True, weight: int = 1) -> list[int]:
        """Accept a worker's gradient, and update if the rule says so; return the workers that must be answered now."""
        up = Dense() if worker in self._near else self._up
        if self._knows_own and self._delta_codec(worker) is not None:
            up.add(message, self._held[worker])
        if (share := self._share(worker)) is None:
            return [worker] if answer else []
        if self._weights:
            up.add(message, self._gradient, self._scale(share, weight))
        else:
            up.decode(message, self._gradient)
        return self._pushed(worker, self._gradient, answer, share, weight)

    def push_directly(self, worker: int, gradient: Tensor, weight: int = 1) -> list[int]:
        """The same as `push`, with an unencoded gradient, which may be overwritten."""
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
        """The factor for a second or later push. The second also scales the first; a single push stays unscaled and exact."""
        if len(self._weights) == 1 and (first := self._factors()[0]) != 1.0:
            self._gradient.mul_(first)
        return share * (1 if self._sums else max(1, weight))

    def _factors(self) -> list[float]:
        """The factor of each accumulated push: its share, times its weight in a mean."""
        if self._sums:
            return list(self._shares)
        return [share * weight for share, weight in zip(self._shares, self._weights, strict=True)]

    def leave_round(self, worker: int) -> list[int]:
        """Stop waiting for this worker until its next push; return the workers that must be answered now."""
        self._expected.discard(worker)
        return self._update_if_due(self._gradient)

    def _share(self, worker: int) -> float | None:
        """Count a push; return its fraction of a step, or None if it comes too late."""
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
        """Record an answer to the worker; return it: the update count, and the parameters or their encoded delta."""
        updates = self.optimizer.updates
        self._seen[worker].append(updates)
        if (codec := self._delta_codec(worker)) is None:
            return Message((updates,), (self._parameters.clone(),))
        held = self._held[worker]
        message = codec.encode(subtract(self._parameters, held, out=torch.empty_like(held)), updates)
        codec.add(message, held)
        return message.and_numbers(updates)

    def _delta_codec(self, worker: int) -> Codec | None:
        """The codec of the deltas that this worker gets; None: it gets the parameters themselves."""
        return None if worker in self._near else self._down

    def cost_elements(self, worker: int) -> int:
        """The number of elements that encoding an answer to this worker processes (see `Codec.cost_elements`)."""
        codec = self._delta_codec(worker)
        return 0 if codec is None else codec.cost_elements(self._parameters.numel())

    def copy_to(self, worker: int, parameters: Tensor) -> None:
        """Answer the worker of this rank directly: copy the parameters."""
        self._seen[worker].append(self.optimizer.updates)
        parameters.copy_(self._parameters)

    def pull(self, worker: int, pushes: bool = True) -> Message:
        """Apply any incomplete bundle of pushes, and return the parameters, which the shard records as the worker's version.

        pushes: whether the worker will push gradients.
        """
        self.flush()
        if pushes:
            self.expect(worker)
        self._seen[worker].clear()
        self._seen[worker].append(self.optimizer.updates)
        if self._delta_codec(worker) is not None:
            self._held[worker] = self._parameters.clone()
        return Message((self.optimizer.updates,), (self._parameters.clone(),))

    def expect(self, worker: int) -> None:
        """Make rounds wait for this worker from now on, even before its first push."""
        self._expected.add(worker)

    def has(self, worker: int, parameters: Tensor) -> None:
        """Record that a worker already has these parameters, which it received earlier."""
        if worker not in self._seen:
            self._seen[worker].clear()
            self._seen[worker].append(self.optimizer.updates)
        if self._delta_codec(worker) is not None:
            self._held[worker] = parameters.to(self._parameters, copy=True)

    def seen(self, workers: int) -> Tensor:
        """The update counts of each worker's last answers (workers, answers), int64, padded on the left with -1."""
        longest = max(map(len, self._seen.values()), default=0)
        rows = [list(self._seen[worker]) if worker in self._seen else [] for worker in range(workers)]
        return torch.tensor([[-1] * (longest - len(row)) + row for row in rows], dtype=torch.int64)

    def load_seen(self, table: Tensor) -> None:
        """Restore what `seen` returned."""
        for worker, updates in enumerate(table.tolist()):
            if updates and updates[-1] >= 0:
                self._seen[worker].clear()
                self._seen[worker].extend(number for number in updates if number >= 0)

    def flush(self) -> bool:
        """Apply an incomplete bundle of pushes; return whether there was one."""
        if self._weights:
            self._apply(self._gradient)
            return True
        return False

    def _apply(self, gradient: Tensor) -> None:
        """Make one step from the accumulated pushes; each push counts by its weight and its share of a step.

        The mean of the shares scales the step, and the gradient is the mean weighted by the shares. With plain gradient
        descent, each push thus moves the parameters by its share (Zhang et al. 2016, section 3.2). The same rule is
        used for optimizers such as Adam, which normalize the gradient.
        """
        counted, pushes = self._factors(), len(self._weights)
        share = sum(counted) / (pushes if self._sums else sum(self._weights))
        factor = (pushes if self._sums else 1) / sum(counted)
        self._shares, self._weights = [], []
        if pushes > 1 and factor != 1.0:
            gradient.mul_(factor)
        self.optimizer.apply(gradient, share)
