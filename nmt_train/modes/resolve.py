"""Resolve a mode and the configuration, on a number of ranks, into a plan; and build the training objects from it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from nmt_train.common.errors import UserError
from nmt_train.common.plural import counted
from nmt_train.config import Config, shown
from nmt_train.distributed.codec import CODECS
from nmt_train.distributed.codec.config import CodecConfigs
from nmt_train.distributed.context import BuildContext
from nmt_train.distributed.exchange.parameter_server.update_rules import RULES
from nmt_train.distributed.exchange.staged_join import Waves
from nmt_train.distributed.plan import LocalPlan, OverlapPlan, Plan, ServerPlan
from nmt_train.distributed.registry import EXCHANGES, SCHEDULES, schedule_of
from nmt_train.distributed.schedule.overlap import Overlap
from nmt_train.distributed.schedule.schedule import Schedule
from nmt_train.distributed.transport import Transport
from nmt_train.modes.auto import AUTO
from nmt_train.modes.compatibility import refuse
from nmt_train.modes.table import MODES, Mode
from nmt_train.optim.flat_model import FlatModel
from nmt_train.optim.learning_rate import for_async_workers
from nmt_train.trace import Trace

T = TypeVar("T")
_ALONE, _TOGETHER = "single", "sync"  # the modes of one rank and of several if the configuration names none
_OF_SEVERAL = "server"  # replaces the exchange of a single-rank mode if there are several ranks
_OPTIMIZER = "adam"
# Values with which these keys have no effect; they are not worth a reason.
_WITHOUT_EFFECT = {
    "optimizer.name": _OPTIMIZER, "local.outer": "none", "local.delay": 0, "server.rule": "async", "server.bundle": 1,
    "server.backup": 0, "server.one_node_at_a_time": False, "replicas.buckets": 1,
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
    row = _row(config)
    if EXCHANGES[row.exchange].solitary and len(nodes) > 1:
        row = dataclasses.replace(row, exchange=_OF_SEVERAL)
    values = _Values(row)
    plan = _plan(config, row, nodes, values)
    refuse(plan, config)
    _check_ranks(plan, row, config, nodes)
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
        raise UserError(f"mode: {config.mode!r} is unknown; {meant} {', '.join(MODES)}")
    return MODES[config.mode]


class _Values:
    """Values of keys that the configuration may leave to the mode. chosen: those that it has left, by key."""

    def __init__(self, row: Mode) -> None:
        self._row, self.chosen = row, dict[str, Any]()

    def __call__(self, name: str, given: T | None, default: T) -> T:
        """The given value; if there is none, that of the mode, or else the default."""
        if given is not None:
            return given
        self.chosen[name] = value = self._row.settings.get(name, default)
        return cast(T, value)


def _plan(config: Config, row: Mode, nodes: tuple[int, ...], values: _Values) -> Plan:
    """Without the adaptation of the optimizer to the workers, and without reasons."""
    schedule, exchange = SCHEDULES[row.schedule], EXCHANGES[row.exchange]
    server, local, optimizer, dropping = config.server, config.local, config.optimizer, config.dropping
    workers = (len(set(nodes)) if server.per == "node" else len(nodes)) or 1
    by_server = values("server.up", server.up, row.up), values("server.down", server.down, row.down)
    codecs = {"server": by_server, "replicas": (values("replicas.codec", config.replicas.codec, row.up), row.down)}
    sent, answered = codecs.get(exchange.section, (row.up, row.down))
    # A single rank sends its gradients to the shard without loss.
    sends_updates = schedule.updates or (row.optimizer == "worker" and len(nodes) != 1)
    rule = values("server.rule", server.rule, "async")
    up = values("dropping.up", dropping.up, 0.99)
    down = values("dropping.down", dropping.down, None)
    plan = Plan(
        mode=config.mode or "", schedule=row.schedule, exchange=row.exchange, up=sent, down=answered,
        sends_updates=sends_updates, local_steps=schedule.updates, workers=workers, dropped_up=up, dropped_down=down or 0.0,
        sums=config.batch.reduction == "sum", accumulate=config.batch.accumulate, tied=config.model.tied != "none",
        own_updates=getattr(config, exchange.section).own_updates, algorithm=config.replicas.algorithm,
        waves=_join(config, exchange.section) or Waves(len(nodes)),
        buckets=values("replicas.buckets", config.replicas.buckets, exchange.buckets if schedule.in_parts else 1),
        optimizer=dataclasses.replace(
            optimizer, name=values("optimizer.name", optimizer.name, _OPTIMIZER),
            async_beta1=values("optimizer.async_beta1", optimizer.async_beta1, None),
            async_warmup=values("optimizer.async_warmup", optimizer.async_warmup, None),
        ),
        local=LocalPlan(
            values("local.every", local.every, 100), values("local.outer", local.outer, "none"),
            values("local.delay", local.delay, 0), local.elastic_share, local.outer_rate, local.outer_momentum,
        ),
        overlap=OverlapPlan(
            config.overlap.bound, values("overlap.local_update", config.overlap.local_update, "sum")
        ),
        server=ServerPlan(
            values("server.shards", server.shards, None) or max(1, len(nodes)), rule,
            values("server.bundle", server.bundle, RULES[rule].bundle),
            values("server.backup", server.backup, 0), server.per, server.bypass, server.one_channel_per_node,
            values("server.one_node_at_a_time", server.one_node_at_a_time, False),
        ),
        pipeline=config.pipeline, downpour=config.downpour,
        codecs=CodecConfigs(dropping, config.threshold, config.qsgd, config.tiles),
        low_rank=config.low_rank, low_bit=config.low_bit, recovery=config.recovery, reasons={},
    )  # fmt: skip
    if down is None:  # each delta must carry the new pushes of all other workers
        plan = dataclasses.replace(plan, dropped_down=max(0.0, 1 - max(1, _pushes(plan)) * (1 - up)))
    return plan


def _join(config: Config, section: str) -> Waves | None:
    return {"server": config.server.join, "peers": config.peers.join}.get(section)


def _pushes(plan: Plan) -> int:
    """How many workers' pushes are new to a worker that receives a delta after each of them has pushed once."""
    return plan.workers - plan.knows_own(CODECS[plan.up].biased)


def _check_ranks(plan: Plan, row: Mode, config: Config, nodes: tuple[int, ...]) -> None:
    machines, join = len(set(nodes)), plan.waves
    if row.nodes and machines > row.nodes:
        raise UserError(
            f"mode: {plan.mode} is for {row.nodes} machine, but the ranks are on {machines}; choose another mode, or"
            " start the ranks on fewer machines"
        )
    if nodes and join.most > len(nodes):
        raise UserError(
            f"{EXCHANGES[plan.exchange].section}.join: {join.most} workers are to join, but this run has"
            f" {counted(len(nodes), 'rank')}; let fewer join, or start more ranks"
        )
    if EXCHANGES[plan.exchange].sharded and len(nodes) > 1 and plan.server.backup >= plan.workers:
        raise UserError(
            f"server.backup: with {counted(plan.workers, 'worker')} and backup {plan.server.backup}, rounds would wait for no"
            " worker; lower it, or start more ranks"
        )


def _added_up(plan: Plan) -> int:
    """Return how many workers' updates are each applied in full, not their mean; the mean of a bundle counts as one."""
    outer = plan.local.outer if plan.local_steps else "none"
    if EXCHANGES[plan.exchange].synchronous:
        return plan.workers if outer == "sum" else 1
    rule = RULES[plan.server.rule]
    if rule.holds or outer in ("elastic", "nesterov"):
        return 1
    if plan.sends_updates and not rule.mean:  # shards add up a bundle of finished updates
        return plan.workers
    return max(1, plan.workers // plan.server.bundle)


def _reasons(plan: Plan, config: Config, ranks: int, chosen: Mapping[str, Any], apart: int) -> dict[str, str]:
    """See `Plan.reasons`. chosen: the values that were left to the mode. apart: how many workers' updates are added up."""
    own, exchange, down = f"mode {plan.mode}", EXCHANGES[plan.exchange], CODECS[plan.down]
    exchanges = not exchange.solitary and (ranks > 1 or not config.server.bypass)
    found = {}
    for key in ("beta1", "warmup"):
        before, after = getattr(config.optimizer, key), getattr(plan.optimizer, key)
        if before != after:
            why = f"{shown(before)} configured, but updates of {apart} workers are added up: see optimizer.async_{key}"
            found[f"optimizer.{key}"] = f"{shown(after)} ({why})"
    if plan.optimizer.cosine_until != config.optimizer.cosine_until:
        found["optimizer.cosine_until"] = f"{shown(plan.optimizer.cosine_until)} (stop.after)"
    used = {
        "optimizer": True, "local": plan.local_steps, "server": exchanges, "replicas": exchanges,
        "dropping": exchanges and CODECS[plan.up].drops and not CODECS[plan.up].fixed_share,
        "overlap": exchanges and issubclass(SCHEDULES[plan.schedule], Overlap),
    }  # fmt: skip
    for name, value in chosen.items():
        section, _, key = name.partition(".")
        elsewhere = section in ("server", "replicas") and section != exchange.section
        unused = name == "replicas.codec" and exchange.codec_needs == "lossless"  # it has encodings of its own
        without = elsewhere or unused or (name in _WITHOUT_EFFECT and value == _WITHOUT_EFFECT[name])
        if used[section] and value is not None and not without and (exchanges or not key.startswith("async_")):
            found[name] = f"{shown(value)} ({own})"
    if exchange.sharded and down.drops and not down.fixed_share and ranks > 1 and config.dropping.down is None:
        why = own if chosen["dropping.down"] is not None else f"with pushes of {counted(_pushes(plan), 'worker')}"
        found["dropping.down"] = f"{plan.dropped_down:.4g} (share of a delta not sent, {why})"
    return found


def fit(config: Config, nodes: tuple[int, ...]) -> Config:
    """Adapt the config to the ranks that remain, which are on `nodes`: reduce settings that need more ranks."""
    server, peers, ranks = config.server, config.peers, len(nodes)
    if server.join is not None:
        server = dataclasses.replace(server, join=server.join.at_most(ranks))
    if peers.join is not None:
        peers = dataclasses.replace(peers, join=peers.join.at_most(ranks))
    fitting = dataclasses.replace(config, server=server, peers=peers)
    workers = len(set(nodes)) if server.per == "node" else ranks
    if resolve(fitting).server.backup >= workers:
        fitting = dataclasses.replace(fitting, server=dataclasses.replace(server, backup=workers - 1))
    return fitting


def build(plan: Plan, flat: FlatModel, transport: Transport, trace: Trace) -> Schedule:
    """Build the objects of a plan for the training loop."""
    schedule = schedule_of(plan)
    context = BuildContext(plan, flat, transport, trace, schedule.max_in_flight)
    return schedule(context, EXCHANGES[plan.exchange].build(context))
