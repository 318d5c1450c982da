"""The settings of strategies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer
from pydantic.dataclasses import dataclass

from nmt_train.codec import CODECS
from nmt_train.common.duration import Duration, Updates
from nmt_train.common.section import STRICT, listed, one_of
from nmt_train.strategy.staged_join import Joining
from nmt_train.strategy.update_rules import RULES

Codec = Annotated[str, one_of(CODECS)]


@dataclass(frozen=True, config=STRICT)
class ServerConfig:
    """A sharded parameter server: the modes whose workers push to shards, and pull from them."""

    up: Codec | None = Field(default=None, description=f"encoding of what workers send: {listed(CODECS)}; null: as in the mode")
    down: Codec | None = Field(default=None, description="encoding of what shards send; the same codecs; null: as in the mode")
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
    shards: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="number of ranks that hold a shard, spread over as many machines as possible; null: all",
    )
    bypass: Literal["none", "device", "node"] | None = Field(
        default=None,
        description="which shards a worker exchanges with in full precision: none, device (its own rank's, directly) or node"
        " (also those of its machine's other ranks, thesis 4.2.2); null: as in the mode (device, but node in thesis-sparse and"
        " thesis-sparse-overlap)",
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
    pull_every: int = Field(default=1, ge=1, le=10**9, description="downpour: steps between two pulls of parameters [steps]")
    join: Joining | None = Field(
        default=None,
        description="number of workers that train, and since when: {4: 0u, 8: 2000u} is 4 at first, 8 after 2,000 updates;"
        " other ranks only serve their shards; null: all from the start",
    )


@dataclass(frozen=True, config=STRICT)
class ReplicasConfig:
    """Replicas: the modes in which every rank has all parameters, and all exchange at the same step."""

    codec: Codec | None = Field(
        default=None,
        description=f"encoding of what workers send: {listed(CODECS)} (except in sparse-local: one that can be summed; none in"
        " low-bit); null: as in the mode",
    )
    algorithm: Literal["ring", "butterfly", "mpi", "torch"] = Field(
        default="ring",
        description="except in low-bit and sparse-local: ring, or butterfly (fewer rounds, best with 2, 4, 8, ... ranks); with"
        " codec dense, mpi (the MPI library); with dense or bf16, torch (NCCL if every rank has a GPU, else gloo); auto: torch"
        " between GPUs of one machine that ranks do not share, else ring",
    )
    buckets: int | None = Field(
        default=None,
        ge=1,
        le=10**4,
        description="sync, powersgd, low-bit: largest number of parts in which gradients are sent while the backward"
        " pass continues (powersgd: whole parameters); null: 8, 12 with low-bit, or 1 if the mode cannot",
    )
    late_lookups: bool | None = Field(
        default=None,
        description="sync, powersgd, low-bit: add the gradients of lookups in a tied embedding to those of the next exchange,"
        " so that the buckets of the embedding need not wait until the backward pass ends; null: as in the mode",
    )
    own_updates: bool = Field(
        default=True,
        description="sparse-local: a worker continues from the received parameters plus all of its own updates, including those"
        " not sent yet",
    )


@dataclass(frozen=True, config=STRICT)
class PeersConfig:
    """Peers: mode strom, in which every rank has all parameters, and sends its changes to all others at its own pace."""

    own_updates: bool = Field(
        default=False, description="a worker continues from all of its own updates, including those not sent yet"
    )
    join: Joining | None = Field(
        default=None, description="number of workers that train, and since when, as in server.join; null: all from the start"
    )


@dataclass(frozen=True, config=STRICT)
class LowRankConfig:
    """Low-rank compression (PowerSGD, Vogels et al. 2019)."""

    rank: int = Field(default=1, ge=1, le=1024, description="rank of the approximation: number of columns of each factor")
    dense_updates: Updates = Field(
        default=0, description="updates at the start of training with gradients that are not compressed [updates]"
    )


def _values(given: int) -> int:
    if given not in (2, 3, 15, 255):
        raise ValueError(f"it should be 2, 3, 15 or 255, not {given}")
    return given


Values = Annotated[int, AfterValidator(_values)]


@dataclass(frozen=True, config=STRICT)
class LowBitConfig:
    """Gradients of one to eight bits per element (mode low-bit)."""

    up: Values = Field(
        default=2,
        description="values that an element sent by a worker can have: 2 (one bit), 3 (1.6 bits), 15 (4 bits) or 255 (8 bits)",
    )
    down: Values = Field(default=3, description="the same for an element of the mean, which workers receive")


def _interval(given: Any) -> Duration:
    span = Duration.parse(given)
    if span.unit in "et":
        raise ValueError(f"{given!r}: copies are made after a number of updates or a time: write 100u, 30s or 2m")
    return span


@dataclass(frozen=True, config=STRICT)
class RecoveryConfig:
    """Copies of shards in other machines' memory, from which training continues after processes have ended (mpirun --with-ft
    ulfm).
    """

    every: Annotated[Duration, BeforeValidator(_interval), PlainSerializer(str)] = Field(
        default=Duration.parse("30s"),
        description="interval between two copies of a shard, as 100u or 30s; a time is lengthened to 20 times what the last"
        " copy took; a lost shard loses about this much training",
    )


@dataclass(frozen=True, config=STRICT)
class OverlapConfig:
    """Exchanging while the next batches are computed (thesis 3.4, 3.7)."""

    bound: int = Field(
        default=128,
        ge=0,
        le=10**6,
        description="maximum steps between two exchanges, after which the worker waits; 0: no limit [steps]",
    )
    local_update: Literal["none", "sum", "optimizer"] | None = Field(
        default=None,
        description="updates of a worker's own parameters between exchanges: sum (one, by the gradient that it has just sent),"
        " optimizer (one at every step), none; null: as in the mode (sum, but none in thesis-sparse-overlap)",
    )


@dataclass(frozen=True, config=STRICT)
class PipelineConfig:
    """Exchanging while the next batches are computed, with all workers in lockstep (Pipe-SGD)."""

    width: int = Field(
        default=2,
        ge=1,
        le=1000,
        description="pipeline width K: a gradient is applied K - 1 steps later; 1: no pipeline [steps]",
    )
    warmup: Updates = Field(default=0, description="updates without a pipeline at the start of training [updates]")


@dataclass(frozen=True, config=STRICT)
class LocalConfig:
    """Local steps of every worker's own optimizer between two exchanges."""

    every: int | None = Field(
        default=None,
        ge=0,
        le=10**9,
        description="local steps between two exchanges; 0: one exchange at the end; null: as in the mode [steps]",
    )
    outer: Literal["none", "sum", "nesterov", "elastic"] | None = Field(
        default=None,
        description="how worker deltas are combined: none (average; an asynchronous server adds them up), sum, nesterov (outer"
        " optimizer step, DiLoCo; with a server, its momentum changes once per round of all workers), elastic (only"
        " with a server: pull towards a center, EASGD); null: as in the mode",
    )
    delay: int | None = Field(
        default=None,
        ge=0,
        le=10**6,
        description="local steps that a worker makes while its exchange is in flight: with all-reduce and all-gather exactly"
        " this many, at most local.every; with a server at most this many, and it exchanges again as soon as it can; 0: it"
        " waits; null: as in the mode [steps]",
    )
    elastic_share: float = Field(
        default=0.1, gt=0, le=1, description="elastic: fraction of the distance that worker and center move towards each other"
    )
    outer_rate: float = Field(default=0.7, gt=0, description="nesterov: the outer learning rate")
    outer_momentum: float = Field(default=0.9, ge=0, lt=1, description="nesterov: the outer momentum")
