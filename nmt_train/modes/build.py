"""Combine a row of the table of modes with the configuration, check the result, and build the training objects from it."""

from __future__ import annotations

import dataclasses
import difflib

from nmt_train.common.errors import UserError
from nmt_train.common.plural import counted
from nmt_train.config import Config, shown
from nmt_train.distributed.codec import CODECS
from nmt_train.distributed.codec.topk import dropped_down
from nmt_train.distributed.context import BuildContext, Mode
from nmt_train.distributed.exchange import EXCHANGES
from nmt_train.distributed.exchange.parameter_server.update_rules import RULES
from nmt_train.distributed.schedule import SCHEDULES, chosen
from nmt_train.distributed.schedule.overlap import Overlap
from nmt_train.distributed.schedule.schedule import Schedule
from nmt_train.distributed.transport import Transport
from nmt_train.modes.auto import AUTO
from nmt_train.modes.compatibility import refuse
from nmt_train.modes.table import MODES
from nmt_train.optim.flat_model import FlatModel
from nmt_train.optim.learning_rate import for_async_workers
from nmt_train.trace import Trace

# Values of keys that neither the configuration nor the row of the mode sets.
_LEFT_TO_THE_MODE = {
    "optimizer.name": "adam", "local.every": 100, "local.outer": "none", "local.delay": 0, "exchange.rule": "async",
    "exchange.backup": 0, "exchange.one_node_at_a_time": False,
    "dropping.up": 0.99, "overlap.local_update": "sum",
}  # fmt: skip
# Values with which these keys have no effect; `in_force` leaves them out.
_WITHOUT_EFFECT = {
    "optimizer.name": "adam", "local.outer": "none", "local.delay": 0, "exchange.rule": "async", "exchange.bundle": 1,
    "exchange.backup": 0, "exchange.one_node_at_a_time": False, "exchange.buckets": 1, "exchange.own_updates": True,
}  # fmt: skip
_ALONE, _TOGETHER = "single", "sync"  # the modes of one rank and of several if the configuration names none
_OF_SEVERAL = "server"  # replaces the exchange of a single-rank mode if there are several ranks


def choose_mode(config: Config, ranks: int) -> Config:
    """Return the config with a mode: if it names none, the number of ranks decides."""
    return dataclasses.replace(config, mode=config.mode or (_ALONE if ranks == 1 else _TOGETHER))


def optimizer_name(mode: str | None, given: str | None) -> str:
    """The optimizer of a mode if the configuration gives this name, or none."""
    settings = MODES[mode].settings if mode in MODES else {}
    return given or str(settings.get("optimizer.name", _LEFT_TO_THE_MODE["optimizer.name"]))


def row(config: Config) -> Mode:
    """Return the mode's row with the configured overrides; raise UserError for an unknown mode or incompatible choices."""
    config = choose_mode(config, ranks=1)
    if config.mode == AUTO:
        raise UserError(
            "mode: auto: only nmt-train chooses a mode, from measurements; name one (nmt-simulate --compare says which is best)"
        )
    if config.mode not in MODES:
        near = difflib.get_close_matches(str(config.mode), MODES, n=1)
        meant = f"did you mean {near[0]}? There are" if near else "choose one of"
        raise UserError(f"mode: {config.mode!r} is unknown; {meant} {', '.join(MODES)}")
    given = {name: value for name, value in vars(config.override).items() if value is not None}
    mode = dataclasses.replace(MODES[config.mode], **given)
    refuse(mode, with_mode_defaults(mode, config))
    schedule, exchange = SCHEDULES[mode.schedule], EXCHANGES[mode.exchange]
    updates = schedule.updates or exchange.exchanges_updates
    at = config.optimizer.at or ("worker" if updates else "shard" if exchange.synchronous else mode.optimizer)
    return dataclasses.replace(mode, optimizer=at)


def check(config: Config, nodes: tuple[int, ...]) -> Mode:
    """Return the row adapted to the ranks; raise UserError if the mode cannot use them. nodes: the node of each rank."""
    mode = row(config)
    machines = len(set(nodes))
    if mode.nodes and machines > mode.nodes:
        raise UserError(
            f"mode: {config.mode} is for {mode.nodes} machine, but the ranks are on {machines}; choose another mode, or"
            " start the ranks on fewer machines"
        )
    if len(nodes) == 1 and config.optimizer.at is None and not SCHEDULES[mode.schedule].updates:
        mode = dataclasses.replace(mode, optimizer="shard")  # a single rank sends its gradients to the shard without loss
    if EXCHANGES[mode.exchange].solitary and len(nodes) > 1:
        mode = dataclasses.replace(mode, exchange=_OF_SEVERAL)
        refuse(mode, with_mode_defaults(mode, config))
    workers = _workers(config, nodes)
    if config.exchange.join is not None and config.exchange.join.most > len(nodes):
        raise UserError(
            f"exchange.join: {config.exchange.join.most} workers are to join, but this run has {counted(len(nodes), 'rank')};"
            " let fewer join, or start more ranks"
        )
    backup = with_mode_defaults(mode, config).exchange.backup or 0
    if EXCHANGES[mode.exchange].sharded and len(nodes) > 1 and backup >= workers:
        raise UserError(
            f"exchange.backup: with {counted(workers, 'worker')} and backup {backup}, rounds would wait for no"
            " worker; lower it, or start more ranks"
        )
    return dataclasses.replace(mode, workers=workers)


def _workers(config: Config, nodes: tuple[int, ...]) -> int:
    """Return the number of workers that exchange: one per rank, or one per node."""
    return len(set(nodes)) if config.exchange.per == "node" else len(nodes)


def fit(config: Config, nodes: tuple[int, ...]) -> Config:
    """Adapt the config to the ranks that remain, which are on `nodes`: reduce settings that need more ranks."""
    exchange, workers = config.exchange, _workers(config, nodes)
    if exchange.join is not None:
        exchange = dataclasses.replace(exchange, join=exchange.join.at_most(len(nodes)))
    backup = with_mode_defaults(row(config), config).exchange.backup or 0
    if backup >= workers:
        exchange = dataclasses.replace(exchange, backup=workers - 1)
    return config if exchange == config.exchange else dataclasses.replace(config, exchange=exchange)


def build(mode: Mode, config: Config, flat: FlatModel, transport: Transport, trace: Trace) -> Schedule:
    """Build the objects of a row for the training loop."""
    config = effective(mode, config)
    schedule = chosen(mode.schedule, config)
    context = BuildContext(config, mode, flat, transport, trace, schedule.max_in_flight, schedule.updates)
    return schedule(context, EXCHANGES[mode.exchange].build(context))


def effective(mode: Mode, config: Config) -> Config:
    """Return the config in force: with the mode's defaults, and with the optimizer adapted to updates that are added up."""
    config = with_mode_defaults(mode, config)
    optimizer = for_async_workers(_added_up(mode, config), config.optimizer, SCHEDULES[mode.schedule].updates)
    if optimizer.schedule == "cosine" and optimizer.cosine_until is None:
        optimizer = dataclasses.replace(optimizer, cosine_until=config.stop.countable)
    return dataclasses.replace(config, optimizer=optimizer)


def _added_up(mode: Mode, config: Config) -> int:
    """Return how many workers' updates are each applied in full, not their mean; the mean of a bundle counts as one."""
    outer = config.local.outer if SCHEDULES[mode.schedule].updates else "none"
    if EXCHANGES[mode.exchange].synchronous:
        return mode.workers if outer == "sum" else 1
    rule = RULES[config.exchange.rule or "async"]
    if rule.holds or outer in ("elastic", "nesterov"):
        return 1
    if mode.optimizer == "worker" and not rule.mean:  # shards add up a bundle of finished updates
        return mode.workers
    return max(1, mode.workers // (config.exchange.bundle or 1))


def in_force(config: Config, nodes: tuple[int, ...]) -> dict[str, str]:
    """Return the values that the mode chooses or adapts and that have an effect on `nodes`, with the reasons."""
    mode = check(config, nodes)
    now = effective(mode, config)
    own, apart = f"mode {config.mode or _ALONE}", _added_up(mode, now)
    schedule, exchanges = SCHEDULES[mode.schedule], len(nodes) > 1 or not config.exchange.bypass
    found = {}
    if exchanges:
        ways = ("up", "down") if EXCHANGES[mode.exchange].sharded else ("up",)
        found = {f"override.{key}": f"{getattr(mode, key)} ({own})" for key in ways}
        found["optimizer.at"] = f"{mode.optimizer} ({own if config.optimizer.at is None else 'configured'})"
    down, drops = CODECS[mode.down], CODECS[mode.up].drops and not CODECS[mode.up].fixed_share
    used = {
        "optimizer": True, "local": schedule.updates, "exchange": exchanges, "dropping": exchanges and drops,
        "overlap": exchanges and issubclass(schedule, Overlap),
    }  # fmt: skip
    for section in (name for name, has_effect in used.items() if has_effect):
        before, after = vars(getattr(config, section)), vars(getattr(now, section))
        for key in (key for key in before if before[key] != after[key]):
            name = f"{section}.{key}"
            if after[key] == _WITHOUT_EFFECT.get(name, before) or (key.startswith("async_") and not exchanges):
                continue
            reason = "stop.after" if key == "cosine_until" else own
            if before[key] is not None:
                reason = (
                    f"{shown(before[key])} configured, but updates of {apart} workers are added up: see optimizer.async_{key}"
                )
            found[name] = f"{shown(after[key])} ({reason})"
    if EXCHANGES[mode.exchange].sharded and down.drops and not down.fixed_share and len(nodes) > 1:
        pushes = mode.workers - now.exchange.knows_own(mode.optimizer == "worker", CODECS[mode.up].build(now, 0.0).biased)
        why = f"with pushes of {counted(pushes, 'worker')}" if now.dropping.down is None else own
        found["dropping.down"] = f"{dropped_down(now.dropping, pushes):.4g} (share of a delta not sent, {why})"
    return found


def with_mode_defaults(mode: Mode, config: Config) -> Config:
    """Return the config with the mode's values for all keys that the config leaves to the mode."""
    exchange, in_parts = EXCHANGES[mode.exchange], SCHEDULES[mode.schedule].in_parts
    left = {**_LEFT_TO_THE_MODE, **mode.settings}
    rule = RULES[config.exchange.rule or str(left["exchange.rule"])]
    of_parts = {
        "exchange.buckets": exchange.buckets if in_parts else 1, "exchange.own_updates": exchange.own_updates,
        "exchange.bundle": rule.bundle,
    }  # fmt: skip
    for name, value in {**left, **of_parts}.items():
        section, key = name.split(".")
        if getattr(getattr(config, section), key) is None:
            part = dataclasses.replace(getattr(config, section), **{key: value})
            config = dataclasses.replace(config, **{section: part})
    return config
