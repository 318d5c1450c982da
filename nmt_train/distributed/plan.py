"""The plan of a run: how its ranks exchange, with every value in force. modes/resolve.py makes it from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nmt_train.distributed.codec.config import CodecConfigs
from nmt_train.distributed.exchange.config import LowBitConfig, LowRankConfig, RecoveryConfig
from nmt_train.distributed.exchange.staged_join import Waves
from nmt_train.distributed.schedule.config import DownpourConfig, PipelineConfig
from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.optimizer import Optimizer
from nmt_train.optim.update_optimizers import update_optimizer


@dataclass(frozen=True)
class LocalPlan:
    """Local steps; see `LocalConfig` for the fields."""

    every: int
    outer: str
    delay: int
    elastic_share: float
    outer_rate: float
    outer_momentum: float


@dataclass(frozen=True)
class OverlapPlan:
    """Exchanging in the background; see `OverlapConfig` for the fields."""

    bound: int
    local_update: str


@dataclass(frozen=True)
class ServerPlan:
    """A sharded parameter server; see `ServerConfig` for the fields. shards: how many ranks hold one."""

    shards: int
    rule: str
    bundle: int
    backup: int
    per: str
    bypass: bool
    one_channel_per_node: bool
    one_node_at_a_time: bool


@dataclass(frozen=True)
class Plan:
    """schedule, exchange, up, down: names of the schedule, the exchange, and the codecs of workers and of shards.

    sends_updates: workers send finished updates, not gradients. local_steps: these are changes by local steps.
    workers: how many exchange. waves: how many train, and since when. dropped_up, dropped_down: shares of elements that
    dropping codecs do not send. sums: gradients are summed, not averaged (batch.reduction: sum). tied: the model's embedding is
    also its output layer.
    reasons: for each value that the user did not choose, and that has an effect: the value and who chose it, by key.
    """

    mode: str
    schedule: str
    exchange: str
    up: str
    down: str
    sends_updates: bool
    local_steps: bool
    workers: int
    dropped_up: float
    dropped_down: float
    sums: bool
    accumulate: int
    tied: bool
    own_updates: bool
    algorithm: str
    buckets: int
    waves: Waves
    optimizer: OptimizerConfig
    local: LocalPlan
    overlap: OverlapPlan
    server: ServerPlan
    pipeline: PipelineConfig
    downpour: DownpourConfig
    codecs: CodecConfigs
    low_rank: LowRankConfig
    low_bit: LowBitConfig
    recovery: RecoveryConfig
    reasons: Mapping[str, str]

    def knows_own(self, feedback: bool) -> bool:
        """Whether a worker continues from received parameters plus all of its own updates, which deltas then leave out.

        feedback: pushes use error feedback. False if bundle is above 1: a delta sent before a bundle is full does not include
        its pushes, and would undo the worker's own updates. False with rules that apply an update only in part.
        """
        in_full = self.server.bundle == 1 and self.server.rule == "async"
        return self.sends_updates and feedback and self.own_updates and in_full

    def outer_optimizer(self, parameters: Tensor, arrivals: int = 0) -> Optimizer:
        """What applies changes by local steps. arrivals: see `update_optimizer`."""
        local = self.local
        return update_optimizer(local.outer, local.outer_rate, local.outer_momentum, self.optimizer, parameters, arrivals)
