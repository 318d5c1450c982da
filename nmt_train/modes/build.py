"""The table: a mode is a schedule (when), an exchange (with whom) and codecs (what travels). A new mode is a new row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nmt_train.common.errors import UserError
from nmt_train.config import Config, shown
from nmt_train.distributed.codec import Codec, SizeOnly, dropped_down
from nmt_train.distributed.codec.dense import Dense
from nmt_train.distributed.codec.int8 import Int8
from nmt_train.distributed.codec.onebit import OneBit
from nmt_train.distributed.codec.qsgd import Qsgd
from nmt_train.distributed.codec.strom_threshold import Threshold
from nmt_train.distributed.codec.topk import TopK
from nmt_train.distributed.exchange import Exchange, ExchangeConfig
from nmt_train.distributed.exchange.all_reduce import AllReduce
from nmt_train.distributed.exchange.library_all_reduce import ByWire
from nmt_train.distributed.exchange.parameter_server.node_channel import OneChannel
from nmt_train.distributed.exchange.parameter_server.per_node import PerNode, first_ranks
from nmt_train.distributed.exchange.parameter_server.replication import Copies
from nmt_train.distributed.exchange.parameter_server.server import Server
from nmt_train.distributed.exchange.parameter_server.update_rules import Asynchronous, Rounds, Rule, SoftSync, StalenessAware
from nmt_train.distributed.exchange.powersgd import LowRank
from nmt_train.distributed.exchange.ring import Reducer, Ring
from nmt_train.distributed.exchange.single import Alone
from nmt_train.distributed.exchange.strom import Peers
from nmt_train.distributed.schedule import Schedule
from nmt_train.distributed.schedule.bucketed import Bucketed
from nmt_train.distributed.schedule.downpour import Downpour
from nmt_train.distributed.schedule.easgd import Elastic
from nmt_train.distributed.schedule.every_step import EveryStep
from nmt_train.distributed.schedule.local_sgd import LocalSteps
from nmt_train.distributed.schedule.overlap import Overlap
from nmt_train.distributed.schedule.pipe_sgd import Pipelined
from nmt_train.distributed.transport import Wire
from nmt_train.modes.compatibility import refuse
from nmt_train.modes.table import Mode
from nmt_train.optim.flat_model import Flat
from nmt_train.optim.optimizer import Optimizer, among
from nmt_train.optim.update_optimizers import Adder, Outer
from nmt_train.trace import Trace

MODES = {
    "single": Mode("every-step", "alone", "dense", "dense", "thesis 3.1, 3.5", nodes=1),
    "vanilla": Mode("every-step", "server", "dense", "dense", "thesis 3.3, 3.6"),
    "overlap": Mode("overlapped", "server", "dense", "dense", "thesis 3.4, 3.7"),
    "sparse": Mode("every-step", "server", "top-k", "top-k", "thesis 3.8", optimizer="worker"),
    "sparse-overlap": Mode("overlapped", "server", "top-k", "top-k", "thesis 4.2.5", optimizer="worker"),
    "staleness-aware": Mode("every-step", "server", "dense", "dense", "Zhang 2016",
                            settings={"exchange.rule": "staleness-aware"}),
    "softsync": Mode("every-step", "server", "dense", "dense", "Zhang 2016",
                     settings={"exchange.rule": "softsync", "exchange.bundle": 2}),
    "backup": Mode("every-step", "server", "dense", "dense", "Chen 2016",
                   settings={"exchange.rule": "rounds", "exchange.backup": 1}),
    "downpour": Mode("downpour", "server", "dense", "dense", "Dean 2012, Farrell & Yang 2016",
                     settings={"exchange.shards": 1, "optimizer.name": "adagrad"}),
    "easgd": Mode("local-steps", "server", "dense", "dense", "Zhang 2015", optimizer="worker",
                  settings={"local.outer": "elastic", "local.every": 10}),
    "strom": Mode("every-step", "peers", "threshold", "threshold", "Strom 2015, 2.6", optimizer="worker"),
    "sync": Mode("every-step", "all-reduce", "dense", "dense", "Arnold 2016, Algorithm 1"),
    "powersgd": Mode("every-step", "all-reduce", "low-rank", "low-rank", "Vogels 2019"),
    "pipe": Mode("pipelined", "all-reduce", "half", "half", "Pipe-SGD, Algorithm 1"),
    "local-sgd": Mode("local-steps", "all-reduce", "dense", "dense", "Stich 2019", optimizer="worker"),
    "simuparallel": Mode("local-steps", "all-reduce", "dense", "dense", "thesis 2.3.1", optimizer="worker",
                         settings={"local.every": 0}),
    "diloco": Mode("local-steps", "all-reduce", "half", "half", "DiLoCo", optimizer="worker",
                   settings={"local.outer": "nesterov"}),
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """What the builders of a row may use."""

    config: Config
    flat: Flat
    wire: Wire
    trace: Trace

    @property
    def sums(self) -> bool:
        """Whether gradients are joined by their sum."""
        return self.config.batch.reduction == "sum"

    def codec(self, name: str, dropped: float) -> Codec:
        """A codec for vectors like the model's: of those without values only sizes are sent."""
        made = CODECS[name](self.config, dropped)
        return SizeOnly(made) if self.flat.parameters.is_meta else made


def row(config: Config) -> Mode:
    """The mode's row with the config's overrides; UserError if there is none, or its choices make no sense together."""
    if config.mode not in MODES:
        raise UserError(f"mode: {config.mode!r} is unknown; this version has {', '.join(MODES)}")
    given = {name: value for name, value in vars(config.override).items() if value is not None}
    mode = dataclasses.replace(MODES[config.mode], **given)
    refuse(mode, settled(mode, config))
    own = mode.schedule == "local-steps" or mode.exchange == "peers"  # what workers give away are updates
    gradients = mode.exchange == "all-reduce" or config.exchange.local_gradient
    at = config.optimizer.at or ("worker" if own else "shard" if gradients else mode.optimizer)
    return dataclasses.replace(mode, optimizer=at)


def check(config: Config, nodes: tuple[int, ...]) -> Mode:
    """`row`, for ranks on `nodes`; UserError if the mode cannot use them."""
    mode = row(config)
    machines = len(set(nodes))
    if mode.nodes and machines > mode.nodes:
        raise UserError(
            f"mode: {config.mode} is for {mode.nodes} machine, but the ranks are on {machines}; choose another mode, or start"
            " fewer ranks"
        )
    if len(nodes) == 1 and config.optimizer.at is None and mode.schedule != "local-steps":
        mode = dataclasses.replace(mode, optimizer="shard")  # nothing is dropped on the way to it
    if mode.exchange == "alone" and len(nodes) > 1:
        if config.override.exchange == "alone":
            raise UserError(f"override.exchange: alone is for one rank, but there are {len(nodes)}; remove it")
        mode = dataclasses.replace(mode, exchange="server")
        refuse(mode, settled(mode, config))
    workers = _workers(config, nodes)
    if config.exchange.join is not None and config.exchange.join.most > len(nodes):
        raise UserError(
            f"exchange.join: {config.exchange.join.most} workers are to join, but there are {len(nodes)} ranks; give fewer, or"
            " start more ranks"
        )
    backup = settled(mode, config).exchange.backup or 0
    if mode.exchange == "server" and len(nodes) > 1 and backup >= workers:
        raise UserError(
            f"exchange.backup: of {workers} workers {backup} would not be waited for; give fewer, or start more ranks"
        )
    return dataclasses.replace(mode, workers=workers)


def _workers(config: Config, nodes: tuple[int, ...]) -> int:
    """How many exchange: every rank, or every node."""
    return len(set(nodes)) if config.exchange.per == "node" else len(nodes)


def fit(config: Config, nodes: tuple[int, ...]) -> Config:
    """The config where only ranks on these nodes are left: what fewer cannot do, they do as far as they can."""
    exchange, workers = config.exchange, _workers(config, nodes)
    if exchange.join is not None and exchange.join.most > len(nodes):
        exchange = dataclasses.replace(exchange, join=None)
    backup = settled(row(config), config).exchange.backup or 0
    if backup >= workers:
        exchange = dataclasses.replace(exchange, backup=workers - 1)
    return config if exchange is config.exchange else dataclasses.replace(config, exchange=exchange)


def build(mode: Mode, config: Config, flat: Flat, wire: Wire, trace: Trace) -> Schedule:
    """The objects of a row, ready for the loop."""
    place = Place(effective(mode, config), flat, wire, trace)
    return SCHEDULES[mode.schedule](place, EXCHANGES[mode.exchange](place, mode))


def effective(mode: Mode, config: Config) -> Config:
    """The config as it is in force: with the mode's own choices, and an optimizer for as many workers as do not wait."""
    config = settled(mode, config)
    return dataclasses.replace(config, optimizer=among(_asynchronous(mode, config), config.optimizer))


def _asynchronous(mode: Mode, config: Config) -> int:
    """How many workers update without waiting for one another.

    An update of a bundle is one of so many workers together; of all that exchange together, one of all.
    """
    in_step = mode.exchange == "all-reduce" or config.exchange.rule == "rounds"
    return 1 if in_step else max(1, mode.workers // (config.exchange.bundle or 1))


def in_force(config: Config, nodes: tuple[int, ...]) -> dict[str, str]:
    """What is in force on ranks on these nodes and differs from the config, or is left to the mode: values with reasons."""
    mode = check(config, nodes)
    now = effective(mode, config)
    own, apart = f"mode {config.mode}", _asynchronous(mode, now)
    found = {f"override.{key}": f"{getattr(mode, key)} ({own})" for key in ("schedule", "exchange", "up", "down")}
    if len(nodes) > 1:
        found["optimizer.at"] = f"{mode.optimizer} ({own if config.optimizer.at is None else 'configured'})"
    for section in ("optimizer", "local", "exchange"):
        before, after = vars(getattr(config, section)), vars(getattr(now, section))
        for key in (key for key in before if before[key] != after[key]):
            reason = own
            if before[key] is not None:
                reason = f"{shown(before[key])} configured, but {apart} workers update without waiting: see async_{key}"
            found[f"{section}.{key}"] = f"{shown(after[key])} ({reason})"
    if mode.exchange == "server" and mode.down == "top-k" and len(nodes) > 1:
        pushes = mode.workers - now.exchange.knows_own(mode.optimizer == "worker", CODECS[mode.up](now, 0.0).biased)
        found["dropping.down"] = f"{dropped_down(now.dropping, pushes):.4g} (of a delta for {pushes} workers' pushes)"
    return found


def settled(mode: Mode, config: Config) -> Config:
    """The config with the mode's own choices for keys that are left to it."""
    buckets = _BUCKETS if mode.in_buckets else 1
    for name, value in {**_LEFT_TO_THE_MODE, "exchange.buckets": buckets, **mode.settings}.items():
        section, key = name.split(".")
        if getattr(getattr(config, section), key) is None:
            part = dataclasses.replace(getattr(config, section), **{key: value})
            config = dataclasses.replace(config, **{section: part})
    return config


def _alone(place: Place, mode: Mode) -> Exchange:
    return Alone(Optimizer(place.config.optimizer, place.flat.parameters), place.trace)


def _server(place: Place, mode: Mode) -> Exchange:
    config, dropping, wire, parameters = place.config, place.config.dropping, place.wire, place.flat.parameters
    at_worker, feedback = mode.optimizer == "worker", place.codec(mode.up, dropping.up).biased
    dropped = dropped_down(dropping, mode.workers - config.exchange.knows_own(at_worker, feedback))
    down = None if mode.down == "dense" else lambda: place.codec(mode.down, dropped)
    pushes = config.exchange.per == "device" or wire.rank in first_ranks(wire.nodes)
    recovers = wire.survives and wire.size > 1 and config.recovery.copies
    server: Exchange = Server(
        wire, parameters, config.optimizer, config.exchange, at_worker=at_worker, feedback=feedback, trace=place.trace,
        rule=RULES[config.exchange.rule or "async"](config.exchange),
        up=lambda: place.codec(mode.up, dropping.up), down=down, delay=DELAYS[mode.schedule], pushes=pushes,
        prepares=mode.schedule != "local-steps",
        copies=(lambda shards: Copies(wire, shards, config.recovery)) if recovers else None, sums=place.sums,
    )  # fmt: skip
    if config.exchange.per == "node":
        return PerNode(server, wire, parameters, place.sums)
    return OneChannel(server, wire) if config.exchange.one_channel_per_node else server


def _all_reduce(place: Place, mode: Mode) -> Exchange:
    config = place.config
    codec = "dense" if mode.up == "low-rank" else mode.up
    if config.exchange.algorithm != "ring":
        reducer: Reducer = ByWire(place.wire, config.exchange.algorithm, place.trace)
    else:
        reducer = Ring(place.wire, place.codec(codec, config.dropping.up), place.trace)
    if mode.up == "low-rank":
        flat, rank = place.flat, config.low_rank.rank
        reducer = LowRank(reducer, flat.layout, rank, flat.gradient, place.trace)
    if mode.optimizer == "shard":
        optimizer, longest = Optimizer(config.optimizer, place.flat.parameters), config.optimizer.clip_norm
    else:
        optimizer, longest = _adder(config, place.flat.parameters.clone()), 0.0
    return AllReduce(place.wire, optimizer, reducer, longest, place.trace, place.sums)


def _peers(place: Place, mode: Mode) -> Exchange:
    config, codec = place.config, place.codec(mode.up, place.config.dropping.up)
    prepares = mode.schedule != "local-steps"
    return Peers(place.wire, place.flat.parameters, config.optimizer, codec, place.trace, prepares)


def _adder(config: Config, parameters: Tensor) -> Optimizer:
    """What takes updates that workers have made."""
    if config.local.outer == "nesterov":
        return Outer(config.optimizer, parameters, config.local.outer_rate, config.local.outer_momentum)
    return Adder(config.optimizer, parameters)


def _every_step(place: Place, exchange: Exchange) -> Schedule:
    buckets, accumulate = place.config.exchange.buckets or 1, place.config.batch.accumulate
    if buckets > 1:
        assert isinstance(exchange, AllReduce), "other exchanges are refused"
        return Bucketed(place.flat, exchange, place.wire, place.trace, accumulate, buckets, place.sums)
    return EveryStep(place.flat, exchange, place.config.optimizer.clip_norm, accumulate, place.sums)


def _overlapped(place: Place, exchange: Exchange) -> Schedule:
    config = place.config
    return Overlap(place.flat, exchange, place.wire, place.trace, config.overlap, config.optimizer, place.sums)


def _pipelined(place: Place, exchange: Exchange) -> Schedule:
    assert isinstance(exchange, AllReduce), "other exchanges are refused"
    return Pipelined(place.flat, exchange, place.wire, place.trace, place.config.pipeline, place.sums)


def _downpour(place: Place, exchange: Exchange) -> Schedule:
    return Downpour(place.flat, exchange, place.config.downpour, place.config.optimizer.clip_norm, place.sums)


def _local_steps(place: Place, exchange: Exchange) -> Schedule:
    kind = Elastic if place.config.local.outer == "elastic" else LocalSteps
    return kind(place.flat, exchange, place.trace, place.config.local, place.config.optimizer)


SCHEDULES: dict[str, Callable[[Place, Exchange], Schedule]] = {
    "every-step": _every_step, "overlapped": _overlapped, "pipelined": _pipelined, "local-steps": _local_steps,
    "downpour": _downpour,
}  # fmt: skip
DELAYS = {"every-step": 0, "overlapped": 1, "local-steps": 0, "downpour": 0}  # exchanges that a gradient is behind
_BUCKETS = 8  # the more, the sooner the first sets out; with 8, as fast as DDP (docs/benchmarks.md)
_LEFT_TO_THE_MODE = {
    "optimizer.name": "adam", "local.every": 100, "local.outer": "none", "exchange.rule": "async", "exchange.bundle": 1,
    "exchange.backup": 0,
}  # fmt: skip
RULES: dict[str, Callable[[ExchangeConfig], Rule]] = {
    "async": lambda config: Asynchronous(config.bundle or 1),
    "staleness-aware": lambda config: StalenessAware(config.bundle or 1),
    "softsync": lambda config: SoftSync(config.bundle or 1),
    "rounds": lambda config: Rounds(config.backup or 0),
}
EXCHANGES: dict[str, Callable[[Place, Mode], Exchange]] = {
    "alone": _alone,
    "server": _server,
    "all-reduce": _all_reduce,
    "peers": _peers,
}
CODECS: dict[str, Callable[[Config, float], Codec]] = {
    "dense": lambda config, dropped: Dense(),
    "half": lambda config, dropped: Dense(torch.float16),
    "bf16": lambda config, dropped: Dense(torch.bfloat16),
    "top-k": lambda config, dropped: TopK(config.dropping, dropped),
    "int8": lambda config, dropped: Int8(),
    "onebit": lambda config, dropped: OneBit(),
    "qsgd": lambda config, dropped: Qsgd(config.qsgd),
    "threshold": lambda config, dropped: Threshold(config.threshold),
}
