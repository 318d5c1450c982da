"""Reject incompatible choices with an error message."""

from __future__ import annotations

from collections.abc import Callable

from nmt_train.codec import CODECS
from nmt_train.common.errors import UserError
from nmt_train.config import Config
from nmt_train.config_text import shown
from nmt_train.modes.table import MODES, Replicas
from nmt_train.replicas.collective_all_reduce import SUMS
from nmt_train.replicas.reducers import REDUCERS
from nmt_train.strategy.plan import EVERY_STEP, AlonePlan, Family, PeersPlan, Plan, ReplicasPlan, ServerPlan
from nmt_train.strategy.update_rules import RULES

_SECTIONS = ("server", "replicas", "peers")
_ACCUMULATING = (EVERY_STEP, "downpour")  # cadences for which batch.accumulate applies
_ONLY_OF_ALL_GATHER = {"decay": 1.0, "rate": 1.0}  # keys of `tiles`, with their default values


def refuse(plan: Plan, config: Config) -> None:
    """Raise UserError for the first rule that the plan or the configuration breaks."""
    for rule in _RULES:
        if (sentence := rule(plan, config)) is not None:
            raise UserError(sentence)


def section_of(family: Family) -> str:
    """The section of the configuration that has a family's settings; one rank has those of the server of several."""
    return "replicas" if isinstance(family, ReplicasPlan) else "peers" if isinstance(family, PeersPlan) else "server"


def _modes(fits: Callable[[object], bool]) -> str:
    """The names of the modes whose family, as the table has it, fits."""
    return ", ".join(name for name, mode in MODES.items() if fits(mode.family))


def _section(plan: Plan, config: Config) -> str | None:
    """Reject keys of the sections that belong to modes of another kind."""
    own = section_of(plan.family)
    for section in (section for section in _SECTIONS if section != own):
        given, here = getattr(config, section), vars(getattr(config, own))
        for key in (key for key, value in vars(given).items() if value != getattr(type(given)(), key)):
            same = {"up": "codec", "codec": "up"}.get(key, key)
            what = f"use {own}.{same}" if same in here else "remove it"
            return f"{section}.{key}: the settings of mode {plan.mode} are in section {own}; {what}"
    return None


def _steps(plan: Plan, config: Config) -> str | None:
    """Reject numbers of steps that do not fit the cadence."""
    if config.batch.accumulate > 1 and plan.cadence not in _ACCUMULATING:
        able = _modes(lambda family: getattr(family, "cadence", EVERY_STEP) in _ACCUMULATING)
        return f"batch.accumulate: mode {plan.mode} decides itself which steps it combines; remove it, or choose one of {able}"
    if plan.exchanges_once and plan.local.outer == "elastic":
        return (
            "local.every: with local.outer elastic, an exchange moves the saved parameters by a share of what workers learned,"
            " so a single exchange at the end loses the rest; set local.every, for example to 10"
        )
    if plan.local.delay and plan.local.outer == "elastic":
        return "local.delay: with local.outer elastic, a worker needs the center as it is at that moment; set local.delay: 0"
    if plan.local.delay and plan.exchanges_once:
        return "local.delay: with local.every 0, the only exchange is at the end, and no steps follow; set local.delay: 0"
    if plan.exchanges_once and all(span.unit == "u" for span in config.stop.after):
        return f"stop.after: counts updates, but mode {plan.mode} makes only one, at the end; use epochs, target tokens or time"
    return None


def _codecs(plan: Plan, config: Config) -> str | None:
    family, tiles = plan.family, config.tiles
    if tiles.keep > tiles.size:
        return f"tiles.keep: {tiles.keep} elements are more than a tile has (tiles.size {tiles.size}); lower it"
    if isinstance(family, ServerPlan):
        for key, value in _ONLY_OF_ALL_GATHER.items():
            if family.up == "tile-top-k" and getattr(tiles, key) != value:
                able = _modes(lambda family: isinstance(family, Replicas) and family.reducer == "all-gather")
                return f"tiles.{key}: only for mode {able}, not {plan.mode}; set it to {shown(value)}"
    given = [codec for codec in (config.server.up, config.server.down) if codec is not None]
    if isinstance(family, AlonePlan) and not all(CODECS[codec].lossless for codec in given):
        return "server.up, server.down: one rank sends nothing; remove them, or start more ranks"
    return None


def _replicas(plan: Plan, config: Config) -> str | None:
    family = plan.family
    if not isinstance(family, ReplicasPlan):
        return None
    needs, codec, by = REDUCERS[family.reducer].codecs, CODECS[family.codec], family.algorithm
    if needs == "own" and not codec.lossless:
        return f"replicas.codec: mode {plan.mode} has encodings of its own (low_bit.up, low_bit.down); remove it"
    if needs == "summable" and not codec.summable:
        able = ", ".join(name for name, codec in CODECS.items() if codec.summable)
        return f"replicas.codec: {family.codec} cannot be summed hop by hop, as mode {plan.mode} requires; use one of {able}"
    if by != "ring" and needs != "summable":
        able = _modes(lambda family: isinstance(family, Replicas) and REDUCERS[family.reducer].codecs == "summable")
        return f"replicas.algorithm: {by} is for the modes {able}, not {plan.mode}; remove it"
    if family.codec not in SUMS.get(by, CODECS):
        return f"replicas.algorithm: {by} sums {' or '.join(SUMS[by])}, not {family.codec}; use ring, or another replicas.codec"
    if plan.optimizer.name == "muon" and plan.sums and family.cadence == EVERY_STEP:
        return f"batch.reduction: with optimizer.name muon, mode {plan.mode} exchanges no gradients to sum; set it to mean"
    if family.buckets > 1 and family.cadence != EVERY_STEP:
        able = _modes(lambda family: isinstance(family, Replicas) and family.cadence == EVERY_STEP)
        return f"replicas.buckets: only the modes {able} send gradients in parts, not {plan.mode}; remove it"
    if family.late_lookups and family.cadence != EVERY_STEP:
        return f"replicas.late_lookups: mode {plan.mode} does not send gradients in parts; remove it"
    if family.late_lookups and family.reducer == "powersgd" and config.low_rank.dense_updates:
        return "replicas.late_lookups: late gradients would wait until low_rank.dense_updates end; set that to 0"
    if plan.local_steps and family.local.outer == "elastic":
        return f"local.outer: elastic needs a server, which has the center, but mode {plan.mode} has none; use mode easgd"
    if plan.local_steps and family.local.delay > family.local.every > 0:
        return (
            f"local.delay: {family.local.delay} steps are more than local.every ({family.local.every}), so two exchanges would"
            f" be in flight; set local.delay to at most {family.local.every}, or raise local.every"
        )
    return None


def _server(plan: Plan, config: Config) -> str | None:
    family = plan.family
    if not isinstance(family, ServerPlan):
        return None
    if plan.optimizer.name == "muon" and not family.sends_updates and CODECS[family.up].drops:
        return (
            f"optimizer.name: muon needs all elements of a matrix, but in mode {plan.mode} shards update by a few; use adam, or"
            " a mode whose workers update, as low-bit, sparse-overlap or sparse-local"
        )
    rule, outer = RULES[family.rule], family.local.outer
    if family.cadence == "downpour" or outer == "elastic":
        separately = f"but mode {plan.mode} sends and receives separately"
        if family.per == "node":
            return f"server.per: node lets a node's devices exchange together, {separately}; remove it"
        if family.one_node_at_a_time:
            return f"server.one_node_at_a_time: a worker waits for each machine's answer, {separately}; set it to false"
        if rule.holds:
            return f"server.rule: with {family.rule}, a worker waits until its push is applied, {separately}; use async"
    if outer == "nesterov" and family.bundle > 1 and not rule.mean:
        return (
            f"server.bundle: with server.rule {family.rule}, shards add up a bundle, but local.outer nesterov needs"
            " its mean; set server.rule: softsync"
        )
    if outer == "sum" and rule.mean:
        return f"local.outer: sum adds up deltas, but server.rule {family.rule} takes their mean; remove one of them"
    if outer == "sum" and family.per == "node":
        return "local.outer: sum adds up deltas, but server.per node takes their mean; set local.outer: none"
    if family.backup and not rule.holds:
        return (
            f"server.backup: discards late pushes to rounds, but server.rule {family.rule} has none; set"
            " server.rule: rounds, or server.backup: 0"
        )
    return _rounds(family) if rule.holds else None


def _rounds(server: ServerPlan) -> str | None:
    """Reject what rounds exclude, in which all workers wait for each other."""
    if server.one_channel_per_node:
        return "server.one_channel_per_node: lets one rank of a node exchange at a time, but a round waits for all; remove it"
    if server.one_node_at_a_time:
        return (
            "server.one_node_at_a_time: a worker waits for one machine's answer, but in rounds this answer waits for all"
            " workers; set it to false"
        )
    if server.bundle > 1:
        return (
            f"server.bundle: a round of server.rule {server.rule} ends when all workers have pushed, not after a"
            " number of pushes; set server.bundle: 1, or another rule"
        )
    if server.backup and (server.cadence == "overlapped" or server.local.delay):
        return (
            "server.backup: with exchanges in the background, every push is computed on older parameters, so it would count"
            " as late and be discarded; use mode backup, or server.backup: 0"
        )
    if server.backup and not CODECS[server.up].lossless:
        return (
            f"server.backup: discards late pushes, which with server.up {server.up} also contain parts of earlier gradients;"
            " use server.up: dense, or server.backup: 0"
        )
    return None


def _join(plan: Plan, config: Config) -> str | None:
    section = section_of(plan.family)
    if {"server": config.server.join, "peers": config.peers.join}.get(section) is None:
        return None
    if isinstance(plan.family, ServerPlan) and RULES[plan.family.rule].holds:
        return f"{section}.join: lets workers join later, but mode {plan.mode} needs all from the start; remove it"
    if plan.local_steps:
        return f"server.join: not with the local steps of mode {plan.mode}; remove it"
    if plan.per_node:
        return "server.join: lets single devices join, but server.per is node; remove one of them"
    return None


_RULES: tuple[Callable[[Plan, Config], str | None], ...] = (_section, _codecs, _replicas, _server, _join, _steps)
