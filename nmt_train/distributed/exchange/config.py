"""The settings that exchanges share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nmt_train.common.section import STRICT, one_of
from nmt_train.distributed.exchange.parameter_server.update_rules import RULES
from nmt_train.distributed.exchange.staged_join import Joining


@dataclass(frozen=True, config=STRICT)
class ExchangeConfig:
    """How workers and shards exchange, besides what the mode determines."""

    bypass: bool = Field(default=True, description="a worker accesses the shard of its own rank directly, without encoding")
    shards: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="number of ranks that hold a shard, spread over as many machines as possible; null: all",
    )
    algorithm: Literal["ring", "butterfly", "mpi", "torch"] = Field(
        default="ring",
        description="all-reduce, powersgd: ring or butterfly (with every summable codec; butterfly needs fewer rounds,"
        " best with 2, 4, 8, ... ranks), or, in full precision, mpi (the MPI library) or torch (NCCL if every rank has a GPU,"
        " else gloo)",
    )
    buckets: int | None = Field(
        default=None,
        ge=1,
        le=10**4,
        description="all-reduce, powersgd, low-bit: largest number of parts in which gradients are sent while the backward"
        " pass continues (powersgd: whole parameters); null: 8, 12 with low-bit, or 1 if the mode cannot",
    )
    rule: Annotated[str, one_of(RULES)] | None = Field(
        default=None,
        description="when a shard updates: async (after `bundle` pushes), staleness-aware (each push divided by its"
        " staleness), softsync (by the mean of `bundle` pushes), rounds (when all workers but `backup` have"
        " pushed); null: as in the mode",
    )
    bundle: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="number of pushes that a shard combines into one update; null: 2 with rule softsync, else 1 [pushes]",
    )
    backup: int | None = Field(
        default=None,
        ge=0,
        le=10**6,
        description="rounds: number of slowest workers that a round does not wait for; their late pushes are discarded;"
        " null: as in the mode",
    )
    per: Literal["device", "node"] = Field(
        default="device", description="who exchanges: every device, or all devices of a node together (thesis 3.7)"
    )
    one_channel_per_node: bool = Field(
        default=False, description="at most one rank of a node exchanges at any time (thesis 3.4)"
    )
    one_node_at_a_time: bool | None = Field(
        default=None,
        description="a worker exchanges with the shards of one machine, waits for their answers, then exchanges with the next"
        " machine (thesis 3.3); null: as in the mode (false, but true in thesis-sparse and thesis-sparse-overlap)",
    )
    own_updates: bool | None = Field(
        default=None,
        description="optimizer.at worker: a worker continues from the received parameters plus all of its own updates,"
        " including those not sent yet; no effect if bundle is above 1, or with another rule than async; null: true, but false"
        " with exchange peers",
    )
    join: Joining | None = Field(
        default=None,
        description="number of workers that train, and since when: {4: 0u, 8: 2000u} is 4 at first, 8 after 2,000 updates;"
        " other ranks only serve their shards; null: all from the start",
    )

    def knows_own(self, exchanges_updates: bool, feedback: bool) -> bool:
        """Whether a worker continues from received parameters plus all of its own updates, which deltas then leave out.

        exchanges_updates: workers push finished updates. feedback: pushes use error feedback.

        False if bundle is above 1: a delta sent before a bundle is full does not include its pushes, and would undo the
        worker's own updates. False with rules that apply an update only in part.
        """
        in_full = self.bundle in (None, 1) and self.rule in (None, "async")
        return bool(exchanges_updates and feedback and self.own_updates and in_full)
