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
    """Workers and shards: what passes between them beside the choices of the mode."""

    bypass: bool = Field(
        default=True, description="a worker reaches the shard of its own rank directly: nothing is encoded, sent or dropped"
    )
    shards: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="ranks that hold a part of the parameters, one of each machine first; null: all",
    )
    algorithm: Literal["ring", "mpi", "torch"] = Field(
        default="ring",
        description="all-reduce, powersgd: by our own ring, with any codec, or in full precision by the MPI library or by"
        " torch.distributed (NCCL where ranks have GPUs, else gloo)",
    )
    buckets: int | None = Field(
        default=None,
        ge=1,
        le=10**4,
        description="all-reduce: parts in which gradients travel, those of later layers while earlier ones are computed; 1: all"
        " at once; null: 8, where they may travel apart",
    )
    rule: Annotated[str, one_of(RULES)] | None = Field(
        default=None,
        description="when a shard updates: async (a bundle is full), staleness-aware (steps divided by it), softsync (by the"
        " mean of a bundle), rounds (every worker has pushed, but for `backup`); null: as the mode has it",
    )
    bundle: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="pushes that a shard joins before it updates (Aji & Heafield 2019; see batch.reduction; finished updates"
        " are added up); null: as the mode has it [pushes]",
    )
    backup: int | None = Field(
        default=None,
        ge=0,
        le=10**6,
        description="rounds: workers that a round does not wait for; what they push late is dropped; null: as the mode has it",
    )
    per: Literal["device", "node"] = Field(
        default="device", description="who exchanges: every device, or the devices of a node together (thesis 3.7)"
    )
    one_channel_per_node: bool = Field(
        default=False, description="of the ranks of a node only one exchanges at any time (thesis 3.4)"
    )
    own_updates: bool = Field(
        default=True,
        description="optimizer.at worker, dropping: a worker goes on from what it received plus all of its own updates, also"
        " those that wait to be sent; not where bundle is above 1",
    )
    local_gradient: bool = Field(
        default=False,
        description="a worker goes on from what it received plus an update by its own dense gradient (Aji et al. 2019)",
    )

    join: Joining | None = Field(
        default=None,
        description="workers that train, and from when on, as in {4: 0u, 8: 2000u}; the others serve their shards meanwhile;"
        " null: all from the start",
    )

    def knows_own(self, exchanges_updates: bool, feedback: bool) -> bool:
        """Whether a worker goes on from all of its own updates, and deltas are without them.

        Of a bundle that is not full a delta knows nothing yet: own updates would be taken back.
        """
        return exchanges_updates and feedback and self.own_updates and self.bundle in (None, 1)
