"""Reject incompatible choices with an error message; attributes of the classes determine what can be combined."""

from __future__ import annotations

from collections.abc import Callable

from nmt_train.common.errors import UserError
from nmt_train.config import Config, shown
from nmt_train.distributed.codec import CODECS
from nmt_train.distributed.context import Mode
from nmt_train.distributed.exchange import EXCHANGES
from nmt_train.distributed.exchange.parameter_server.update_rules import RULES
from nmt_train.distributed.schedule import SCHEDULES, chosen

# The keys of `exchange` that only exchange server uses, with their default values.
_ONLY_OF_SHARDS = {
    "per": "device", "one_channel_per_node": False, "one_node_at_a_time": False, "rule": "async",
    "bundle": 1, "backup": 0, "shards": None, "bypass": True,
}  # fmt: skip

_ONLY_OF_ALL_GATHER = {"decay": 1.0, "rate": 1.0}  # the same of `tiles`


def refuse(mode: Mode, config: Config) -> None:
    """Raise UserError for the first rule that the choices break; `config` already contains the mode's defaults."""
    for rule in _RULES:
        if (sentence := rule(mode, config)) is not None:
            raise UserError(sentence)


def _choice(key: str, mode: Mode, config: Config) -> str:
    """The beginning of a sentence about a choice: the key that the user set, or the mode that made the choice."""
    value = getattr(mode, key)
    if getattr(config.override, key) is not None:
        return f"override.{key}: {value}"
    return f"mode: {config.mode} has {key} {value}, which"


def _alone(mode: Mode, config: Config) -> str | None:
    if not EXCHANGES[mode.exchange].solitary:
        return None
    for key in ("up", "down"):
        if not CODECS[getattr(mode, key)].lossless:
            return f"{_choice(key, mode, config)} encodes what is sent, but mode {config.mode} sends nothing; remove it"
    return None


def _accumulating(mode: Mode, config: Config) -> str | None:
    if config.batch.accumulate > 1 and not SCHEDULES[mode.schedule].accumulates:
        return (
            f"batch.accumulate: schedule {mode.schedule} of mode {config.mode} decides itself which steps it combines;"
            " remove it, or choose a mode with schedule every-step"
        )
    return None


def _codec(mode: Mode, config: Config) -> str | None:
    needs = EXCHANGES[mode.exchange].codec_needs
    if not needs or getattr(CODECS[mode.up], needs):
        return None
    able = ", ".join(name for name, codec in CODECS.items() if getattr(codec, needs))
    what = {"summable": "summed hop by hop", "exact_sums": "added up exactly in any order"}.get(needs, "used")
    return (
        f"{_choice('up', mode, config)} cannot be {what}, as exchange {mode.exchange} requires; set override.up to one of"
        f" {able}, or choose a mode with a server"
    )


def _synchronous(mode: Mode, config: Config) -> str | None:
    exchange, schedule, by = EXCHANGES[mode.exchange], SCHEDULES[mode.schedule], config.exchange.algorithm
    if not exchange.synchronous:
        return None
    if by in ("mpi", "torch") and not CODECS[mode.up].lossless:
        return (
            f"exchange.algorithm: {by} sums in full precision, not {mode.up}; use ring or butterfly, or set override.up: dense"
        )
    if config.optimizer.at == "worker" and not schedule.updates:
        return (
            f"optimizer.at: worker needs a server that adds updates, but mode {config.mode} has exchange {mode.exchange};"
            " remove it"
        )
    return None


def _outer(mode: Mode, config: Config) -> str | None:
    """Reject what an outer optimizer cannot use."""
    settings, exchange = config.exchange, EXCHANGES[mode.exchange]
    if not SCHEDULES[mode.schedule].updates:
        return None
    if config.local.outer == "elastic" and exchange.synchronous:
        return f"local.outer: elastic needs a server, which has the center, but mode {config.mode} has none; use mode easgd"
    if config.local.outer != "nesterov" or exchange.synchronous:
        return None
    if (settings.bundle or 1) > 1 and not RULES[settings.rule or "async"].mean:
        return (
            f"exchange.bundle: with exchange.rule {settings.rule}, shards add up a bundle, but local.outer nesterov needs its"
            " mean; set exchange.rule: softsync"
        )
    dropping = next((codec for codec in (mode.up, mode.down) if CODECS[codec].drops), None)
    if dropping and settings.own_updates:
        return (
            f"exchange.own_updates: with {dropping}, a worker would continue from updates in full that local.outer nesterov"
            " applies in part; set exchange.own_updates: false"
        )
    return None


def _sum(mode: Mode, config: Config) -> str | None:
    if config.local.outer != "sum" or not SCHEDULES[mode.schedule].updates:
        return None
    rule = RULES[config.exchange.rule or "async"]
    if not EXCHANGES[mode.exchange].synchronous and rule.mean:
        return f"local.outer: sum adds up deltas, but exchange.rule {config.exchange.rule} takes their mean; remove one of them"
    if config.exchange.per == "node":
        return "local.outer: sum adds up deltas, but exchange.per node takes their mean; set local.outer: none"
    return None


def _delay(mode: Mode, config: Config) -> str | None:
    local = config.local
    if not local.delay or not SCHEDULES[mode.schedule].updates:
        return None
    if local.outer == "elastic":
        return "local.delay: with local.outer elastic, a worker needs the center as it is at that moment; set local.delay: 0"
    if not local.every:
        return "local.delay: with local.every 0, the only exchange is at the end, and no steps follow; set local.delay: 0"
    if EXCHANGES[mode.exchange].synchronous and local.delay > local.every:
        return (
            f"local.delay: {local.delay} steps are more than local.every ({local.every}), so two exchanges would be in flight;"
            f" set local.delay to at most {local.every}, or raise local.every"
        )
    return None


def _tiles(mode: Mode, config: Config) -> str | None:
    if config.tiles.keep > config.tiles.size:
        return f"tiles.keep: {config.tiles.keep} elements are more than a tile has (tiles.size {config.tiles.size}); lower it"
    for key, value in _ONLY_OF_ALL_GATHER.items():
        if mode.up == "tile-top-k" and mode.exchange != "all-gather" and getattr(config.tiles, key) != value:
            return (
                f"tiles.{key}: needs exchange all-gather, but mode {config.mode} has exchange {mode.exchange}; set it to"
                f" {shown(value)}"
            )
    return None


def _one_call(mode: Mode, config: Config) -> str | None:
    settings = config.exchange
    if chosen(mode.schedule, config).one_call:
        return None
    separately = f"but mode {config.mode} sends and receives separately"
    if settings.per == "node":
        return f"exchange.per: node lets a node's devices exchange together, {separately}; remove it"
    if settings.one_node_at_a_time:
        return f"exchange.one_node_at_a_time: a worker waits for each machine's answer, {separately}; set it to false"
    if EXCHANGES[mode.exchange].sharded and RULES[settings.rule or "async"].holds:
        return f"exchange.rule: with {settings.rule}, a worker waits until its push is applied, {separately}; use async"
    return None


def _own_updates(mode: Mode, config: Config) -> str | None:
    if config.optimizer.at == "shard" and (SCHEDULES[mode.schedule].updates or EXCHANGES[mode.exchange].exchanges_updates):
        return (
            f"optimizer.at: shard needs gradients, but in mode {config.mode} workers send finished updates; remove it, or"
            " choose another mode"
        )
    return None


def _only_of_shards(mode: Mode, config: Config) -> str | None:
    if EXCHANGES[mode.exchange].sharded or EXCHANGES[mode.exchange].solitary:
        return None
    if config.override.down not in (None, "dense"):
        return f"override.down: encodes what servers send, but mode {config.mode} has exchange {mode.exchange}; remove it"
    for key, value in _ONLY_OF_SHARDS.items():
        if getattr(config.exchange, key) != value:
            return (
                f"exchange.{key}: needs exchange server, but mode {config.mode} has exchange {mode.exchange}; set it to"
                f" {shown(value)}"
            )
    return None


def _shards(mode: Mode, config: Config) -> str | None:
    settings, up, down = config.exchange, CODECS[mode.up], CODECS[mode.down]
    if not EXCHANGES[mode.exchange].sharded:
        return None
    if not (down.biased or down.lossless):
        return (
            f"{_choice('down', mode, config)} rounds at random, and each delta contains the error of the one"
            " before, so the error would grow without limit; use dense, half, int8 or top-k"
        )
    holds = RULES[settings.rule or "async"].holds
    if holds and settings.one_channel_per_node:
        return "exchange.one_channel_per_node: lets one rank of a node exchange at a time, but a round waits for all; remove it"
    if holds and settings.one_node_at_a_time:
        return (
            "exchange.one_node_at_a_time: a worker waits for one machine's answer, but in rounds this answer waits for all"
            " workers; set it to false"
        )
    if settings.backup and not holds:
        return (
            f"exchange.backup: discards late pushes to rounds, but exchange.rule {settings.rule} has none; set"
            " exchange.rule: rounds, or exchange.backup: 0"
        )
    if holds and (settings.bundle or 1) > 1:
        return (
            f"exchange.bundle: a round of exchange.rule {settings.rule} ends when all workers have pushed, not after a number"
            " of pushes; set exchange.bundle: 1, or another rule"
        )
    if holds and settings.backup and chosen(mode.schedule, config).max_in_flight:
        return (
            f"exchange.backup: with schedule {mode.schedule} of mode {config.mode}, every push is computed on older parameters,"
            " so it would count as late and be discarded; use mode backup, or exchange.backup: 0"
        )
    if holds and settings.backup and not up.lossless:
        return (
            f"exchange.backup: discards late pushes, which with override.up {mode.up} also contain parts of earlier gradients;"
            " use override.up: dense, or exchange.backup: 0"
        )
    return None


def _algorithm(mode: Mode, config: Config) -> str | None:
    by = config.exchange.algorithm
    if by == "ring" or EXCHANGES[mode.exchange].codec_needs == "summable":
        return None
    return (
        f"exchange.algorithm: {by} is for exchanges all-reduce and powersgd, but mode {config.mode} has {mode.exchange};"
        " remove it"
    )


def _buckets(mode: Mode, config: Config) -> str | None:
    if config.exchange.buckets == 1 or (SCHEDULES[mode.schedule].in_parts and EXCHANGES[mode.exchange].buckets > 1):
        return None
    return (
        "exchange.buckets: only schedule every-step with exchange all-reduce, powersgd or low-bit sends gradients in parts, but"
        f" mode {config.mode} has {mode.schedule} and {mode.exchange}; remove it"
    )


def _join(mode: Mode, config: Config) -> str | None:
    if config.exchange.join is None:
        return None
    exchange = EXCHANGES[mode.exchange]
    if exchange.synchronous or exchange.solitary or RULES[config.exchange.rule or "async"].holds:
        return f"exchange.join: lets workers join later, but mode {config.mode} needs all workers from the start; remove it"
    if SCHEDULES[mode.schedule].updates or config.exchange.per == "node":
        return (
            "exchange.join: needs a schedule that sends gradients, and exchange.per: device; the schedule is"
            f" {mode.schedule}, and exchange.per is {config.exchange.per}; remove it"
        )
    return None


def _one_exchange(mode: Mode, config: Config) -> str | None:
    once = SCHEDULES[mode.schedule].updates and config.local.every == 0
    if once and config.local.outer == "elastic":
        return (
            "local.every: with local.outer elastic, an exchange moves the saved parameters by a share of what workers learned,"
            " so a single exchange at the end loses the rest; set local.every, for example to 10"
        )
    if once and all(span.unit == "u" for span in config.stop.after):
        return (
            f"stop.after: counts updates, but mode {config.mode} makes only one, at the end; use epochs, target tokens or time"
        )
    return None


_RULES: tuple[Callable[[Mode, Config], str | None], ...] = (
    _alone, _accumulating, _codec, _synchronous, _algorithm, _buckets, _outer, _only_of_shards,
    _own_updates, _sum, _tiles, _delay, _one_call, _shards, _join, _one_exchange,
)  # fmt: skip
