"""Reject incompatible choices with an error message."""

from __future__ import annotations

from collections.abc import Callable

from nmt_train.common.errors import UserError
from nmt_train.config import Config, shown
from nmt_train.distributed.codec import CODECS
from nmt_train.distributed.exchange.exchange import Exchange
from nmt_train.distributed.exchange.parameter_server.update_rules import RULES
from nmt_train.distributed.plan import Plan
from nmt_train.distributed.registry import EXCHANGES, SCHEDULES, schedule_of
from nmt_train.distributed.schedule.schedule import Schedule
from nmt_train.modes.table import MODES

_SECTIONS = ("server", "replicas", "peers")
_ONLY_OF_ALL_GATHER = {"decay": 1.0, "rate": 1.0}  # keys of `tiles`, with their default values


def refuse(plan: Plan, config: Config) -> None:
    """Raise UserError for the first rule that the plan or the configuration breaks."""
    for rule in _RULES:
        if (sentence := rule(plan, config)) is not None:
            raise UserError(sentence)


def _modes(fits: Callable[[type[Schedule], type[Exchange]], bool]) -> str:
    """The names of the modes whose schedule and exchange fit."""
    return ", ".join(name for name, row in MODES.items() if fits(SCHEDULES[row.schedule], EXCHANGES[row.exchange]))


def _other_section(plan: Plan, config: Config) -> str | None:
    """Reject keys of the sections that belong to modes of another kind."""
    own = EXCHANGES[plan.exchange].section
    for section in (section for section in _SECTIONS if section != own):
        given, here = getattr(config, section), vars(getattr(config, own))
        for key in (key for key, value in vars(given).items() if value != getattr(type(given)(), key)):
            same = {"up": "codec", "codec": "up"}.get(key, key)
            what = f"use {own}.{same}" if same in here else "remove it"
            return f"{section}.{key}: the settings of mode {plan.mode} are in section {own}; {what}"
    return None


def _accumulating(plan: Plan, config: Config) -> str | None:
    if config.batch.accumulate > 1 and not SCHEDULES[plan.schedule].accumulates:
        return (
            f"batch.accumulate: mode {plan.mode} decides itself which steps it combines; remove it, or choose one of"
            f" {_modes(lambda schedule, exchange: schedule.accumulates)}"
        )
    return None


def _codec(plan: Plan, config: Config) -> str | None:
    needs, by = EXCHANGES[plan.exchange].codec_needs, plan.algorithm
    if needs == "lossless" and not CODECS[plan.up].lossless:
        return f"replicas.codec: mode {plan.mode} has encodings of its own (low_bit.up, low_bit.down); remove it"
    if needs and not getattr(CODECS[plan.up], needs):
        able = ", ".join(name for name, codec in CODECS.items() if getattr(codec, needs))
        return f"replicas.codec: {plan.up} cannot be summed hop by hop, as mode {plan.mode} requires; use one of {able}"
    if by != "ring" and needs != "summable":
        able = _modes(lambda schedule, exchange: exchange.codec_needs == "summable")
        return f"replicas.algorithm: {by} is for the modes {able}, not {plan.mode}; remove it"
    if by in ("mpi", "torch") and not CODECS[plan.up].lossless:
        return f"replicas.algorithm: {by} sums in full precision, not {plan.up}; use ring, or set replicas.codec: dense"
    if EXCHANGES[plan.exchange].solitary and not (CODECS[plan.up].lossless and CODECS[plan.down].lossless):
        return "server.up, server.down: one rank sends nothing; remove them, or start more ranks"
    return None


def _outer(plan: Plan, config: Config) -> str | None:
    """Reject what an outer optimizer cannot use."""
    exchange = EXCHANGES[plan.exchange]
    if not plan.local_steps:
        return None
    if plan.local.outer == "elastic" and exchange.synchronous:
        return f"local.outer: elastic needs a server, which has the center, but mode {plan.mode} has none; use mode easgd"
    if plan.local.outer != "nesterov" or exchange.synchronous:
        return None
    if plan.server.bundle > 1 and not RULES[plan.server.rule].mean:
        return (
            f"server.bundle: with server.rule {plan.server.rule}, shards add up a bundle, but local.outer nesterov needs"
            " its mean; set server.rule: softsync"
        )
    dropping = next((codec for codec in (plan.up, plan.down) if CODECS[codec].drops), None)
    if dropping and plan.own_updates:
        return (
            f"server.own_updates: with {dropping}, a worker would continue from updates in full that local.outer nesterov"
            " applies in part; set server.own_updates: false"
        )
    return None


def _sum(plan: Plan, config: Config) -> str | None:
    if plan.local.outer != "sum" or not plan.local_steps:
        return None
    rule = RULES[plan.server.rule]
    if not EXCHANGES[plan.exchange].synchronous and rule.mean:
        return f"local.outer: sum adds up deltas, but server.rule {plan.server.rule} takes their mean; remove one of them"
    if plan.server.per == "node":
        return "local.outer: sum adds up deltas, but server.per node takes their mean; set local.outer: none"
    return None


def _delay(plan: Plan, config: Config) -> str | None:
    local = plan.local
    if not local.delay or not plan.local_steps:
        return None
    if local.outer == "elastic":
        return "local.delay: with local.outer elastic, a worker needs the center as it is at that moment; set local.delay: 0"
    if not local.every:
        return "local.delay: with local.every 0, the only exchange is at the end, and no steps follow; set local.delay: 0"
    if EXCHANGES[plan.exchange].synchronous and local.delay > local.every:
        return (
            f"local.delay: {local.delay} steps are more than local.every ({local.every}), so two exchanges would be in flight;"
            f" set local.delay to at most {local.every}, or raise local.every"
        )
    return None


def _tiles(plan: Plan, config: Config) -> str | None:
    if config.tiles.keep > config.tiles.size:
        return f"tiles.keep: {config.tiles.keep} elements are more than a tile has (tiles.size {config.tiles.size}); lower it"
    for key, value in _ONLY_OF_ALL_GATHER.items():
        if plan.up == "tile-top-k" and plan.exchange != "all-gather" and getattr(config.tiles, key) != value:
            able = _modes(lambda schedule, exchange: exchange is EXCHANGES["all-gather"])
            return f"tiles.{key}: only for mode {able}, not {plan.mode}; set it to {shown(value)}"
    return None


def _one_call(plan: Plan, config: Config) -> str | None:
    if schedule_of(plan).one_call:
        return None
    separately = f"but mode {plan.mode} sends and receives separately"
    if plan.server.per == "node":
        return f"server.per: node lets a node's devices exchange together, {separately}; remove it"
    if plan.server.one_node_at_a_time:
        return f"server.one_node_at_a_time: a worker waits for each machine's answer, {separately}; set it to false"
    if EXCHANGES[plan.exchange].sharded and RULES[plan.server.rule].holds:
        return f"server.rule: with {plan.server.rule}, a worker waits until its push is applied, {separately}; use async"
    return None


def _shards(plan: Plan, config: Config) -> str | None:
    up, down = CODECS[plan.up], CODECS[plan.down]
    if not EXCHANGES[plan.exchange].sharded:
        return None
    if not (down.biased or down.lossless):
        return (
            f"server.down: {plan.down} rounds at random, and each delta contains the error of the one"
            " before, so the error would grow without limit; use dense, half, int8 or top-k"
        )
    holds = RULES[plan.server.rule].holds
    if holds and plan.server.one_channel_per_node:
        return "server.one_channel_per_node: lets one rank of a node exchange at a time, but a round waits for all; remove it"
    if holds and plan.server.one_node_at_a_time:
        return (
            "server.one_node_at_a_time: a worker waits for one machine's answer, but in rounds this answer waits for all"
            " workers; set it to false"
        )
    if plan.server.backup and not holds:
        return (
            f"server.backup: discards late pushes to rounds, but server.rule {plan.server.rule} has none; set"
            " server.rule: rounds, or server.backup: 0"
        )
    if holds and plan.server.bundle > 1:
        return (
            f"server.bundle: a round of server.rule {plan.server.rule} ends when all workers have pushed, not after a"
            " number of pushes; set server.bundle: 1, or another rule"
        )
    if holds and plan.server.backup and schedule_of(plan).max_in_flight:
        return (
            f"server.backup: in mode {plan.mode}, every push is computed on older parameters,"
            " so it would count as late and be discarded; use mode backup, or server.backup: 0"
        )
    if holds and plan.server.backup and not up.lossless:
        return (
            f"server.backup: discards late pushes, which with server.up {plan.up} also contain parts of earlier gradients;"
            " use server.up: dense, or server.backup: 0"
        )
    return None


def _buckets(plan: Plan, config: Config) -> str | None:
    def able(schedule: type[Schedule], exchange: type[Exchange]) -> bool:
        return schedule.in_parts and exchange.buckets > 1

    if plan.buckets == 1 or able(SCHEDULES[plan.schedule], EXCHANGES[plan.exchange]):
        return None
    return f"replicas.buckets: only the modes {_modes(able)} send gradients in parts, not {plan.mode}; remove it"


def _join(plan: Plan, config: Config) -> str | None:
    exchange = EXCHANGES[plan.exchange]
    if getattr(getattr(config, exchange.section), "join", None) is None:
        return None
    if exchange.synchronous or RULES[plan.server.rule].holds:
        return f"{exchange.section}.join: lets workers join later, but mode {plan.mode} needs all from the start; remove it"
    if plan.local_steps:
        return f"server.join: not with the local steps of mode {plan.mode}; remove it"
    if plan.server.per == "node":
        return "server.join: lets single devices join, but server.per is node; remove one of them"
    return None


def _one_exchange(plan: Plan, config: Config) -> str | None:
    once = plan.local_steps and plan.local.every == 0
    if once and plan.local.outer == "elastic":
        return (
            "local.every: with local.outer elastic, an exchange moves the saved parameters by a share of what workers learned,"
            " so a single exchange at the end loses the rest; set local.every, for example to 10"
        )
    if once and all(span.unit == "u" for span in config.stop.after):
        return f"stop.after: counts updates, but mode {plan.mode} makes only one, at the end; use epochs, target tokens or time"
    return None


_RULES: tuple[Callable[[Plan, Config], str | None], ...] = (
    _other_section, _accumulating, _codec, _buckets, _outer,
    _sum, _tiles, _delay, _one_call, _shards, _join, _one_exchange,
)  # fmt: skip
