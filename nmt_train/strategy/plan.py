"""The plan of a run: how its ranks exchange, with every value in force. modes/resolve.py makes it from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nmt_train.codec import CODECS
from nmt_train.codec.config import CodecConfigs
from nmt_train.optim.config import OptimizerConfig
from nmt_train.strategy.config import LowBitConfig, LowRankConfig, PipelineConfig, RecoveryConfig
from nmt_train.strategy.staged_join import Waves
from nmt_train.strategy.update_rules import RULES

EVERY_STEP, LOCAL_STEPS = "every-step", "local-steps"  # cadences that several families have


@dataclass(frozen=True)
class LocalPlan:
    """Local steps between two exchanges; see `LocalConfig` for the fields."""

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


NO_LOCAL_STEPS = LocalPlan(every=1, outer="none", delay=0, elastic_share=0.0, outer_rate=0.0, outer_momentum=0.0)


@dataclass(frozen=True)
class AlonePlan:
    """One rank."""


@dataclass(frozen=True)
class ReplicasPlan:
    """Every rank has all parameters; see `ReplicasConfig` for most of the fields.

    cadence: when workers exchange; see `replicas.build.CADENCES`. reducer: how the vectors of all ranks are combined; see
    `REDUCERS`.
    """

    cadence: str
    reducer: str
    codec: str
    algorithm: str
    buckets: int
    late_lookups: bool
    own_updates: bool
    local: LocalPlan
    pipeline: PipelineConfig
    low_rank: LowRankConfig
    low_bit: LowBitConfig


@dataclass(frozen=True)
class ServerPlan:
    """A sharded parameter server; see `ServerConfig` for most of the fields.

    cadence: when workers exchange; see `server.build.CADENCES`. shards: how many ranks hold one. sends_updates: workers push
    finished updates, not gradients. dropped_down: the share of elements that a shard does not send, if its codec drops any.
    """

    cadence: str
    up: str
    down: str
    dropped_down: float
    sends_updates: bool
    shards: int
    rule: str
    bundle: int
    backup: int
    per: str
    bypass: str
    one_channel_per_node: bool
    one_node_at_a_time: bool
    local: LocalPlan
    overlap: OverlapPlan
    pull_every: int

    @property
    def local_steps(self) -> bool:
        return self.cadence == LOCAL_STEPS

    @property
    def keeps_own(self) -> bool:
        """Whether a worker continues from received parameters plus all of its own updates, which deltas then leave out.

        False if bundle is above 1: a delta sent before a bundle is full does not include its pushes, and would undo the
        worker's own updates. False with rules that apply an update only in part, where nothing is left out of a push, and where
        elements are dropped on the way to or from an outer optimizer that applies them in part.
        """
        in_full = self.bundle == 1 and self.rule == "async"
        drops = any(CODECS[codec].drops for codec in (self.up, self.down))
        in_part = self.local.outer == "nesterov" and drops
        return self.sends_updates and in_full and not in_part and not CODECS[self.up].lossless


@dataclass(frozen=True)
class PeersPlan:
    """Every rank has all parameters, and sends its changes to all others (mode strom). up: the codec."""

    up: str
    own_updates: bool


Family = AlonePlan | ReplicasPlan | ServerPlan | PeersPlan


@dataclass(frozen=True)
class Plan:
    """family: the kind of strategy, with its settings.

    workers: how many exchange. waves: how many train, and since when. dropped_up: the share of elements that workers do not
    send, if their codec drops any. sums: gradients are summed, not averaged (batch.reduction: sum). tied: the model's
    embedding is also its output layer, and is trained.
    reasons: for each value that the user did not choose, and that has an effect: the value and who chose it, by key.
    """

    mode: str
    family: Family
    workers: int
    waves: Waves
    dropped_up: float
    sums: bool
    accumulate: int
    tied: bool
    optimizer: OptimizerConfig
    codecs: CodecConfigs
    recovery: RecoveryConfig
    reasons: Mapping[str, str]

    @property
    def synchronous(self) -> bool:
        """Whether all workers exchange at the same step; no worker may take a step that the others do not take."""
        return isinstance(self.family, ReplicasPlan)

    @property
    def cadence(self) -> str:
        """When workers exchange."""
        return self.family.cadence if isinstance(self.family, ReplicasPlan | ServerPlan) else EVERY_STEP

    @property
    def local_steps(self) -> bool:
        """Whether workers exchange changes by local steps."""
        return self.cadence == LOCAL_STEPS

    @property
    def local(self) -> LocalPlan:
        """With effect only if there are local steps."""
        return self.family.local if isinstance(self.family, ReplicasPlan | ServerPlan) else NO_LOCAL_STEPS

    @property
    def exchanges_once(self) -> bool:
        """Whether the only exchange is at the end of training."""
        return self.local_steps and not self.local.every

    @property
    def workers_wait(self) -> bool:
        """Whether workers wait for each other at every exchange."""
        rounds = isinstance(self.family, ServerPlan) and RULES[self.family.rule].holds
        return self.synchronous or rounds or self.per_node

    @property
    def per_node(self) -> bool:
        """Whether one rank of each node exchanges for all of the node's ranks."""
        return isinstance(self.family, ServerPlan) and self.family.per == "node"
