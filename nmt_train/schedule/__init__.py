"""When a worker exchanges its gradients: the protocol that every schedule follows."""

from __future__ import annotations

from typing import Protocol

from nmt_train.exchange import Exchange


class Schedule(Protocol):
    """`exchange` is with whom; `gradient_norm` is that of the last gradient given away, before clipping."""

    exchange: Exchange
    gradient_norm: float

    def step(self) -> bool:
        """After each backward pass; True when the worker's parameters changed.

        NotFinite if the gradient is not finite; it is then dropped, and training can go on with the next batch.
        """

    def drain(self) -> None:
        """Finish what is in flight: before a checkpoint, and at the end."""
