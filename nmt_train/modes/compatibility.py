"""Products of schedule, exchange and codecs that make no sense, each with the sentence that says so."""

from __future__ import annotations

from collections.abc import Callable

from nmt_train.common.errors import UserError
from nmt_train.config import Config
from nmt_train.modes.table import Mode

UNBIASED = ("qsgd",)  # codecs that are right on the mean, so that nothing may be kept of what they leave out
SUMMED = ("dense", "half", "bf16", "int8", "low-rank")  # what can be added up and sent on, hop by hop
IN_STEP = ("every-step", "pipelined", "local-steps")  # schedules of workers that exchange all at the same step

Rule = Callable[[Mode, Config], str | None]


def refuse(mode: Mode, config: Config) -> None:
    """UserError with the first rule that the choices break; `config` has the mode's own for what was left to it."""
    for rule in _RULES:
        if (sentence := rule(mode, config)) is not None:
            raise UserError(sentence)


def _alone(mode: Mode, config: Config) -> str | None:
    for key in ("schedule", "up", "down"):
        if mode.exchange == "alone" and getattr(mode, key) not in ("every-step", "dense"):
            return (
                f"override.{key}: {getattr(mode, key)} needs a server to exchange with, but mode {config.mode} is alone;"
                " choose another mode, or override.exchange: server"
            )
    return None


def _accumulating(mode: Mode, config: Config) -> str | None:
    if config.batch.accumulate > 1 and mode.schedule == "overlapped":
        return (
            f"batch.accumulate: mode {config.mode} adds up gradients by itself while it exchanges; remove it, or use a mode"
            " that exchanges at every step"
        )
    if config.batch.accumulate > 1 and mode.schedule != "every-step":
        return (
            f"batch.accumulate: schedule {mode.schedule} of mode {config.mode} uses every step by itself; remove it, or use a"
            " mode that exchanges at every step"
        )
    return None


def _local_gradient(mode: Mode, config: Config) -> str | None:
    settings = config.exchange
    if settings.per == "node" and settings.local_gradient:
        return "exchange.local_gradient: is of one worker, but exchange.per is node; give one of them up"
    if settings.local_gradient and config.optimizer.at == "worker":
        return "exchange.local_gradient: with optimizer.at worker no gradient is ever lost; give one of them up"
    return None


def _all_reduce(mode: Mode, config: Config) -> str | None:
    if mode.exchange != "all-reduce":
        return None
    if mode.up not in SUMMED:
        return (
            f"override.up: {mode.up} cannot be summed hop by hop, as exchange all-reduce does; use {', '.join(SUMMED)}, or"
            " override.exchange: server"
        )
    by = config.exchange.algorithm
    if by != "ring" and mode.up not in ("dense", "low-rank"):
        return f"exchange.algorithm: {by} sums in full precision, not {mode.up}; use ring, or override.up: dense"
    if mode.schedule not in IN_STEP:
        return (
            f"override.schedule: {mode.schedule} lets every worker exchange when it likes, but exchange all-reduce needs all at"
            " the same step; use pipelined, or override.exchange: server"
        )
    if (sentence := _of_a_server(mode, config)) is not None:
        return sentence
    if config.optimizer.at == "worker" and mode.schedule != "local-steps":
        return f"optimizer.at: worker needs a server that adds up, but mode {config.mode} has exchange all-reduce; remove it"
    return None


def _peers(mode: Mode, config: Config) -> str | None:
    if mode.exchange != "peers":
        return None
    if mode.up != "threshold":
        return (
            f"override.up: {mode.up} cannot be added up exactly in any order, as exchange peers does; use threshold, or"
            " override.exchange: server"
        )
    if mode.schedule == "pipelined" or config.local.outer == "nesterov":
        return (
            f"override.exchange: peers go their own ways, but schedule {mode.schedule} of mode {config.mode} needs all at the"
            " same step; use all-reduce"
        )
    return _of_a_server(mode, config)


def _low_rank(mode: Mode, config: Config) -> str | None:
    if mode.exchange != "all-reduce" and "low-rank" in (mode.up, mode.down):
        key = "up" if mode.up == "low-rank" else "down"
        return (
            f"override.{key}: low-rank is a way to sum, which needs exchange all-reduce, not {mode.exchange}; use another codec"
        )
    return None


def _per_node(mode: Mode, config: Config) -> str | None:
    if config.exchange.per == "node" and (mode.schedule == "downpour" or config.local.outer == "elastic"):
        return (
            f"exchange.per: node lets a node's devices exchange together, but in mode {config.mode} each gives and fetches by"
            " itself; remove it"
        )
    return None


def _own_updates(mode: Mode, config: Config) -> str | None:
    if config.optimizer.at == "shard" and (mode.schedule == "local-steps" or mode.exchange == "peers"):
        return (
            f"optimizer.at: shard needs gradients, but in mode {config.mode} workers make updates themselves; remove it, or"
            " choose another mode"
        )
    return None


def _of_a_server(mode: Mode, config: Config) -> str | None:
    plain = {
        "per": "device", "one_channel_per_node": False, "local_gradient": False, "rule": "async", "bundle": 1, "backup": 0,
        "shards": None,
    }  # fmt: skip
    for key, value in plain.items():
        if getattr(config.exchange, key) != value:
            return f"exchange.{key}: is of a server, but mode {config.mode} has exchange {mode.exchange}; remove it"
    return None


def _server(mode: Mode, config: Config) -> str | None:
    if mode.exchange != "server":
        return None
    settings = config.exchange
    if mode.down in UNBIASED:
        return (
            f"override.down: {mode.down} rounds at random, and deltas keep what was rounded for the next one, which would grow"
            " without end; use dense, half, int8 or top-k"
        )
    if settings.rule == "rounds" and settings.one_channel_per_node:
        return "exchange.one_channel_per_node: lets one rank of a node exchange at a time, but a round waits for all; remove it"
    if settings.rule == "rounds" and settings.backup and mode.up != "dense":
        return (
            f"exchange.backup: drops what comes late, which with override.up {mode.up} would not be sent again; use dense, or"
            " backup 0"
        )
    if mode.schedule == "local-steps" and config.local.outer == "nesterov":
        return (
            f"local.outer: nesterov goes on from the mean of all workers' ways, but with exchange server (mode {config.mode})"
            " each comes at its own time; use none or elastic, or override.exchange: all-reduce"
        )
    if mode.schedule == "pipelined":
        return (
            "override.schedule: pipelined keeps all workers in step, but with exchange server each goes its own pace; use"
            " overlapped, or override.exchange: all-reduce"
        )
    return None


def _buckets(mode: Mode, config: Config) -> str | None:
    if config.exchange.buckets == 1 or mode.in_buckets:
        return None
    return (
        "exchange.buckets: parts of a gradient travel apart with schedule every-step and exchange all-reduce, but not low-rank;"
        f" mode {config.mode} has {mode.schedule}, {mode.exchange} and {mode.up}; remove it"
    )


def _join(mode: Mode, config: Config) -> str | None:
    if config.exchange.join is None:
        return None
    if mode.exchange in ("all-reduce", "alone") or config.exchange.rule == "rounds":
        return f"exchange.join: lets workers come later, but in mode {config.mode} none exchanges without all others; remove it"
    if mode.schedule == "local-steps" or config.exchange.per == "node":
        return (
            "exchange.join: is for workers that exchange by themselves what they have computed, not for schedule"
            f" {mode.schedule} with exchange.per {config.exchange.per}; remove it"
        )
    return None


def _one_exchange(mode: Mode, config: Config) -> str | None:
    if mode.schedule == "local-steps" and config.local.every == 0 and all(span.unit == "u" for span in config.stop.after):
        return (
            f"stop.after: counts updates, of which mode {config.mode} makes one, when training ends; give epochs, words or time"
        )
    return None


_RULES: tuple[Rule, ...] = (
    _alone, _accumulating, _local_gradient, _low_rank, _all_reduce, _peers, _own_updates, _per_node, _server, _buckets, _join,
    _one_exchange,
)  # fmt: skip
