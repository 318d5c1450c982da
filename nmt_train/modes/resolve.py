"""Resolve a mode and the configuration, on a number of ranks, into a plan."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from nmt_train.codec import CODECS
from nmt_train.codec.config import CodecConfigs
from nmt_train.common.errors import UserError
from nmt_train.common.plural import counted
from nmt_train.config import Config
from nmt_train.config_text import shown
from nmt_train.modes.auto import AUTO
from nmt_train.modes.compatibility import refuse, section_of
from nmt_train.modes.table import MODES, Alone, Mode, Peers, Replicas, Server
from nmt_train.optim.learning_rate import for_async_workers
from nmt_train.replicas.reducers import REDUCERS
from nmt_train.strategy.plan import (
    EVERY_STEP,
    LOCAL_STEPS,
    NO_LOCAL_STEPS,
    AlonePlan,
    Family,
    LocalPlan,
    OverlapPlan,
    PeersPlan,
    Plan,
    ReplicasPlan,
    ServerPlan,
)
from nmt_train.strategy.staged_join import Waves
from nmt_train.strategy.update_rules import RULES

T = TypeVar("T")
_ALONE, _TOGETHER = "single", "sync"  # the modes of one rank and of several if the configuration names none
_OPTIMIZER, _BUCKETS = "adam", 8  # more buckets begin earlier; 8 are as fast as DDP (docs/benchmarks.md)
# Values with which these keys have no effect; they are not worth a reason.
_WITHOUT_EFFECT = {
    "optimizer.name": _OPTIMIZER, "local.outer": "none", "local.delay": 0, "server.rule": "async", "server.bundle": 1,
    "server.backup": 0, "server.bypass": "device", "server.one_node_at_a_time": False, "replicas.buckets": 1,
    "replicas.late_lookups": False,
}  # fmt: skip


def choose_mode(config: Config, ranks: int) -> Config:
    """Return the config with a mode: if it names none, the number of ranks decides."""
    return dataclasses.replace(config, mode=config.mode or (_ALONE if ranks <= 1 else _TOGETHER))


def optimizer_name(mode: str | None, given: str | None) -> str:
    """The optimizer of a mode if the configuration gives this name, or none."""
    settings = MODES[mode].settings if mode in MODES else {}
    return given or str(settings.get("optimizer.name", _OPTIMIZER))


def resolve(config: Config, nodes: tuple[int, ...] = ()) -> Plan:
    """The plan for ranks on `nodes`, the node of each rank; (): they are not known yet, so what depends on them is not checked.

    Raises UserError if the mode is unknown, cannot use these ranks, or cannot be combined with the configuration.
    """
    config = choose_mode(config, len(nodes))
    mode = _row(config)
    values = _Values(mode)
    plan = _plan(config, mode, nodes, values)
    refuse(plan, config)
    _check_ranks(plan, mode, nodes)
    apart = _added_up(plan)
    optimizer = for_async_workers(apart, plan.optimizer, plan.local_steps)
    if optimizer.schedule == "cosine" and optimizer.cosine_until is None:
        optimizer = dataclasses.replace(optimizer, cosine_until=config.stop.countable)
    plan = dataclasses.replace(plan, optimizer=optimizer)
    return dataclasses.replace(plan, reasons=_reasons(plan, config, len(nodes), values.chosen, apart))


def _row(config: Config) -> Mode:
    """The mode's row."""
    if config.mode == AUTO:
        raise UserError(
            "mode: auto: only nmt-train chooses a mode, from measurements; name one (nmt-simulate --compare says which is best)"
        )
    if config.mode not in MODES:
        near = difflib.get_close_matches(str(config.mode), MODES, n=1)
        meant = f"did you mean {near[0]}? There are" if near else "choose one of"
        raise UserError(f"mode: {config.mode!r} is unknown; {meant} auto, {', '.join(MODES)} (nmt-train --help mode)")
    return MODES[config.mode]


class _Values:
    """Values of keys that the configuration may leave to the mode. chosen: those that it has left, by key."""

    def __init__(self, mode: Mode) -> None:
        self._mode, self.chosen = mode, dict[str, Any]()

    def __call__(self, name: str, given: T | None, default: T) -> T:
        """The given value; if there is none, that of the mode, or else the default."""
        if given is not None:
            return given
        self.chosen[name] = value = self._mode.settings.get(name, default)
        return cast(T, value)


def _plan(config: Config, mode: Mode, nodes: tuple[int, ...], values: _Values) -> Plan:
    """Without the adaptation of the optimizer to the workers, and without reasons."""
    optimizer, up = config.optimizer, config.dropping.up
    family = _family(config, mode, nodes, values)
    sent = _sent(family)
    if CODECS[sent].drops and not CODECS[sent].fixed_share:
        up = values("dropping.up", up, 0.99)
    joining = {"server": config.server.join, "peers": config.peers.join}.get(section_of(family))
    plan = Plan(
        mode=config.mode or "", family=family, workers=_workers(config, nodes), waves=joining or Waves(len(nodes)),
        dropped_up=0.99 if up is None else up, sums=config.batch.reduction == "sum", accumulate=config.batch.accumulate,
        tied=config.model.tied != "none" and config.model.lora_rank is None,
        optimizer=dataclasses.replace(
            optimizer, name=values("optimizer.name", optimizer.name, _OPTIMIZER),
            async_beta1=values("optimizer.async_beta1", optimizer.async_beta1, None),
            async_warmup=values("optimizer.async_warmup", optimizer.async_warmup, None),
        ),
        codecs=CodecConfigs(config.dropping, config.threshold, config.tiles), recovery=config.recovery, reasons={},
    )  # fmt: skip
    if isinstance(family, ServerPlan):
        down = config.dropping.down
        if CODECS[family.down].drops:
            down = values("dropping.down", down, None)
        if down is None:  # each delta must carry the new pushes of all other workers
            down = max(0.0, 1 - max(1, _pushes(plan, family)) * (1 - plan.dropped_up))
        plan = dataclasses.replace(plan, family=dataclasses.replace(family, dropped_down=down))
    return plan


def _workers(config: Config, nodes: tuple[int, ...]) -> int:
    """How many exchange."""
    return (len(set(nodes)) if config.server.per == "node" else len(nodes)) or 1


def _family(config: Config, mode: Mode, nodes: tuple[int, ...], values: _Values) -> Family:
    match mode.family:
        case Replicas() as row:
            return _replicas(config, row, values)
        case Peers(up):
            return PeersPlan(up, config.peers.own_updates)
        case Server() as row:
            return _server(config, row, nodes, values)
        case Alone():
            return AlonePlan() if len(nodes) < 2 else _server(config, Server(), nodes, values)


def _replicas(config: Config, row: Replicas, values: _Values) -> ReplicasPlan:
    replicas = config.replicas
    own = REDUCERS[row.reducer].codecs == "own"  # encodings of its own
    return ReplicasPlan(
        row.cadence, row.reducer, (replicas.codec or row.codec) if own else values("replicas.codec", replicas.codec, row.codec),
        replicas.algorithm, values("replicas.buckets", replicas.buckets, _BUCKETS if row.cadence == EVERY_STEP else 1),
        values("replicas.late_lookups", replicas.late_lookups, False), replicas.own_updates,
        _local(config, row.cadence, values), config.pipeline, config.low_rank, config.low_bit,
    )  # fmt: skip


def _server(config: Config, row: Server, nodes: tuple[int, ...], values: _Values) -> ServerPlan:
    """Without `dropped_down`."""
    server, overlap = config.server, config.overlap
    up, down = values("server.up", server.up, row.up), values("server.down", server.down, row.down)
    rule = values("server.rule", server.rule, "async")
    update = overlap.local_update or "sum"
    if row.cadence == "overlapped":
        update = values("overlap.local_update", overlap.local_update, "sum")
    return ServerPlan(
        cadence=row.cadence, up=up, down=down, dropped_down=0.0,
        # A single rank sends its gradients to the shard without loss.
        sends_updates=row.cadence == LOCAL_STEPS or (row.optimizer == "worker" and len(nodes) != 1),
        local=_local(config, row.cadence, values), overlap=OverlapPlan(overlap.bound, update),
        shards=values("server.shards", server.shards, None) or max(1, len(nodes)), rule=rule,
        bundle=values("server.bundle", server.bundle, RULES[rule].bundle), backup=values("server.backup", server.backup, 0),
        per=server.per, bypass=values("server.bypass", server.bypass, "device"),
        one_channel_per_node=server.one_channel_per_node,
        one_node_at_a_time=values("server.one_node_at_a_time", server.one_node_at_a_time, False), pull_every=server.pull_every,
    )  # fmt: skip


def _local(config: Config, cadence: str, values: _Values) -> LocalPlan:
    local = config.local
    if cadence != LOCAL_STEPS:
        return NO_LOCAL_STEPS
    return LocalPlan(
        values("local.every", local.every, 100), values("local.outer", local.outer, "none"),
        values("local.delay", local.delay, 0), local.elastic_share, local.outer_rate, local.outer_momentum,
    )  # fmt: skip


def _sent(family: Family) -> str:
    """The name of the codec of what workers send."""
    match family:
        case ReplicasPlan(codec=codec):
            return codec
        case ServerPlan(up=codec) | PeersPlan(up=codec):
            return codec
        case AlonePlan():
            return "dense"


def _pushes(plan: Plan, server: ServerPlan) -> int:
    """How many workers' pushes are new to a worker that receives a delta after each of them has pushed once."""
    return plan.workers - server.keeps_own


def _check_ranks(plan: Plan, mode: Mode, nodes: tuple[int, ...]) -> None:
    machines, join = len(set(nodes)), plan.waves
    if mode.nodes and machines > mode.nodes:
        raise UserError(
            f"mode: {plan.mode} is for {mode.nodes} machine, but the ranks are on {machines}; choose another mode, or"
            " start the ranks on fewer machines"
        )
    if nodes and join.most > len(nodes):
        raise UserError(
            f"{section_of(plan.family)}.join: {join.most} workers are to join, but this run has"
            f" {counted(len(nodes), 'rank')}; let fewer join, or start more ranks"
        )
    if isinstance(plan.family, ServerPlan) and len(nodes) > 1 and plan.family.backup >= plan.workers:
        raise UserError(
            f"server.backup: with {counted(plan.workers, 'worker')} and backup {plan.family.backup}, rounds would wait for no"
            " worker; lower it, or start more ranks"
        )


def _added_up(plan: Plan) -> int:
    """Return how many workers' updates are each applied in full, not their mean; the mean of a bundle counts as one."""
    outer, family = plan.local.outer if plan.local_steps else "none", plan.family
    if isinstance(family, ReplicasPlan):
        return plan.workers if outer == "sum" else 1
    if not isinstance(family, ServerPlan):
        return plan.workers
    rule = RULES[family.rule]
    if rule.holds or outer in ("elastic", "nesterov"):
        return 1
    if family.sends_updates and not rule.mean:  # shards add up a bundle of finished updates
        return plan.workers
    return max(1, plan.workers // family.bundle)


def _reasons(plan: Plan, config: Config, ranks: int, chosen: Mapping[str, Any], apart: int) -> dict[str, str]:
    """See `Plan.reasons`. chosen: the values that were left to the mode. apart: how many workers' updates are added up."""
    own, family = f"mode {plan.mode}", plan.family
    exchanges = not isinstance(family, AlonePlan) and (ranks > 1 or config.server.bypass == "none")
    found = {}
    for key in ("beta1", "warmup"):
        before, after = getattr(config.optimizer, key), getattr(plan.optimizer, key)
        if before != after:
            why = f"{shown(before)} configured, but updates of {apart} workers are added up: see optimizer.async_{key}"
            found[f"optimizer.{key}"] = f"{shown(after)} ({why})"
    if plan.optimizer.cosine_until != config.optimizer.cosine_until:
        found["optimizer.cosine_until"] = f"{shown(plan.optimizer.cosine_until)} (stop.after)"
    for name, value in chosen.items():
        always = name.startswith("local.") or name == "optimizer.name"  # with one rank, too
        without = value is None or (name in _WITHOUT_EFFECT and value == _WITHOUT_EFFECT[name])
        if (always or exchanges) and not without:
            found[name] = f"{shown(value)} ({own})"
    if isinstance(family, ServerPlan) and ranks > 1 and "dropping.down" in chosen and not CODECS[family.down].fixed_share:
        why = own if chosen["dropping.down"] is not None else f"with pushes of {counted(_pushes(plan, family), 'worker')}"
        found["dropping.down"] = f"{family.dropped_down:.4g} (share of a delta not sent, {why})"
    return found


def fit(config: Config, nodes: tuple[int, ...]) -> Config:
    """Adapt the config to the ranks that remain, which are on `nodes`: reduce settings that need more ranks."""
    server, peers, ranks = config.server, config.peers, len(nodes)
    if server.join is not None:
        server = dataclasses.replace(server, join=server.join.at_most(ranks))
    if peers.join is not None:
        peers = dataclasses.replace(peers, join=peers.join.at_most(ranks))
    fitting = dataclasses.replace(config, server=server, peers=peers)
    mode, workers = _row(choose_mode(fitting, ranks)), _workers(config, nodes)
    family = _family(fitting, mode, nodes, _Values(mode))
    if isinstance(family, ServerPlan) and family.backup >= workers:
        fitting = dataclasses.replace(fitting, server=dataclasses.replace(server, backup=workers - 1))
    return fitting
