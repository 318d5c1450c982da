"""When a worker exchanges its gradients: the protocol that every schedule follows, and the settings of overlapping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal, Protocol

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from nmt_train.exchange import Exchange, Vectors
from nmt_train.section import STRICT


@dataclass(frozen=True, config=STRICT)
class OverlapConfig:
    """Exchanging while the next batches are computed (thesis 3.4, 3.7)."""

    bound: int = Field(default=0, ge=0, le=10**6, description="most steps from one exchange to the next; 0: any [steps]")
    local_update: Literal["none", "sum", "optimizer"] = Field(
        default="sum",
        description="sum: what was received is updated with the gradients just given away, which it lacks; optimizer: a"
        " worker updates its own parameters at every step in between; none: neither",
    )


class Schedule(Protocol):
    """`exchange` is with whom; `gradient_norm` is that of the last gradient given away, before clipping.

    steps: how many exchanges covered so many steps.
    """

    exchange: Exchange
    gradient_norm: float
    steps: Counter[int]

    def step(self) -> bool:
        """After each backward pass; True when gradients were given away.

        NotFinite if the gradient is not finite; it is then dropped, and training can go on with the next batch.
        """

    def drain(self) -> None:
        """Finish what is in flight: before a checkpoint, before a wait, and at the end."""

    def refresh(self) -> None:
        """Take exactly the global parameters over, while every worker is drained."""

    def carried(self) -> Vectors:
        """What a drained worker keeps, as vectors (elements,)."""

    def carry(self, vectors: Mapping[str, Tensor]) -> None:
        """Go on with what `carried` gave."""
