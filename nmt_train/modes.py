"""The table: a mode is a schedule (when), an exchange (with whom) and codecs (what travels). A new mode is a new row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as section

from nmt_train.codec import Codec, DroppingConfig, dropped_down
from nmt_train.codec.dense import Dense
from nmt_train.codec.topk import TopK, TopKSize
from nmt_train.errors import UserError
from nmt_train.exchange import Exchange
from nmt_train.exchange.alone import Alone
from nmt_train.exchange.channel import OneChannel
from nmt_train.exchange.node import PerNode, first_ranks
from nmt_train.exchange.server import Server
from nmt_train.flat import Flat
from nmt_train.optim import Optimizer, among
from nmt_train.schedule import Schedule
from nmt_train.schedule.every_step import EveryStep
from nmt_train.schedule.overlap import Overlap
from nmt_train.section import STRICT
from nmt_train.trace import Trace
from nmt_train.wire import Wire

if TYPE_CHECKING:
    from nmt_train.config import Config


@dataclass(frozen=True)
class Mode:
    """One row. nodes: most machines (0: any); workers: how many exchange without waiting for one another, as `check` finds.

    optimizer: where gradients become updates. Adam's averages starve on a shard that gets a hundredth of a gradient at a time,
    so that sparse modes drop updates that workers have made of their dense gradients (docs/experiments.md).
    """

    schedule: str
    exchange: str
    up: str
    down: str
    source: str
    optimizer: str = "shard"
    nodes: int = 0
    workers: int = 1


MODES = {
    "single": Mode("every-step", "alone", "dense", "dense", "thesis 3.1, 3.5", nodes=1),
    "vanilla": Mode("every-step", "server", "dense", "dense", "thesis 3.3, 3.6"),
    "overlap": Mode("overlapped", "server", "dense", "dense", "thesis 3.4, 3.7"),
    "sparse": Mode("every-step", "server", "top-k", "top-k", "thesis 3.8", optimizer="worker"),
    "sparse-overlap": Mode("overlapped", "server", "top-k", "top-k", "thesis 4.2.5", optimizer="worker"),
}


@section(frozen=True, config=STRICT)
class OverrideConfig:
    """Choices that replace those of the mode's row; null: as the mode has it."""

    schedule: Literal["every-step", "overlapped"] | None = Field(default=None, description="when: every-step or overlapped")
    exchange: Literal["alone", "server"] | None = Field(default=None, description="with whom: alone or server")
    up: Literal["dense", "half", "top-k"] | None = Field(default=None, description="what workers send: dense, half or top-k")
    down: Literal["dense", "half", "top-k"] | None = Field(default=None, description="what shards send: dense, half or top-k")


@dataclass(frozen=True)
class Place:
    """What the builders of a row may use."""

    config: Config
    flat: Flat
    wire: Wire
    trace: Trace

    def codec(self, name: str, dropped: float) -> Codec:
        """A codec for vectors like the model's: those without values have only sizes to be sent."""
        table = {**CODECS, "top-k": TopKSize} if self.flat.parameters.is_meta else CODECS
        return table[name](self.config.dropping, dropped)


def row(config: Config) -> Mode:
    """The mode's row with the config's overrides; UserError if there is none, or its choices make no sense together."""
    if config.mode not in MODES:
        raise UserError(f"mode: {config.mode!r} is unknown; this version has {', '.join(MODES)}")
    given = {name: value for name, value in vars(config.override).items() if value is not None}
    mode = dataclasses.replace(MODES[config.mode], **given)
    if mode.exchange == "alone":
        for key in ("schedule", "up", "down"):
            if getattr(mode, key) not in ("every-step", "dense"):
                raise UserError(
                    f"override.{key}: {getattr(mode, key)} needs a server to exchange with, but mode {config.mode} is alone;"
                    " choose another mode, or override.exchange: server"
                )
    if mode.schedule == "overlapped" and config.batch.accumulate > 1:
        raise UserError(
            f"batch.accumulate: mode {config.mode} adds up gradients by itself while it exchanges; remove it, or use a mode"
            " that exchanges at every step"
        )
    settings = config.exchange
    if settings.per == "node" and settings.local_gradient:
        raise UserError("exchange.local_gradient: is of one worker, but exchange.per is node; give one of them up")
    if settings.local_gradient and config.optimizer.at == "worker":
        raise UserError("exchange.local_gradient: with optimizer.at worker no gradient is ever lost; give one of them up")
    at = config.optimizer.at or ("shard" if settings.local_gradient else mode.optimizer)
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
    if len(nodes) == 1 and config.optimizer.at is None:
        mode = dataclasses.replace(mode, optimizer="shard")  # nothing is dropped on the way to it
    if mode.exchange == "alone" and len(nodes) > 1:
        if config.override.exchange == "alone":
            raise UserError(f"override.exchange: alone is for one rank, but there are {len(nodes)}; remove it")
        mode = dataclasses.replace(mode, exchange="server")
    return dataclasses.replace(mode, workers=machines if config.exchange.per == "node" else len(nodes))


def build(mode: Mode, config: Config, flat: Flat, wire: Wire, trace: Trace) -> Schedule:
    """The objects of a row, ready for the loop."""
    apart = max(1, mode.workers // config.exchange.bundle)  # an update of a bundle is one of so many workers together
    config = dataclasses.replace(config, optimizer=among(apart, config.optimizer))
    place = Place(config, flat, wire, trace)
    return SCHEDULES[mode.schedule](place, EXCHANGES[mode.exchange](place, mode))


def _alone(place: Place, mode: Mode) -> Exchange:
    return Alone(Optimizer(place.config.optimizer, place.flat.parameters), place.trace)


def _server(place: Place, mode: Mode) -> Exchange:
    config, dropping, wire, parameters = place.config, place.config.dropping, place.wire, place.flat.parameters
    at_worker, feedback = mode.optimizer == "worker", mode.up != "dense"
    dropped = dropped_down(dropping, mode.workers - config.exchange.knows_own(at_worker, feedback))
    down = None if mode.down == "dense" else lambda: place.codec(mode.down, dropped)
    pushes = config.exchange.per == "device" or wire.rank in first_ranks(wire.nodes)
    server: Exchange = Server(
        wire, parameters, config.optimizer, config.exchange, at_worker=at_worker, feedback=feedback, trace=place.trace,
        up=lambda: place.codec(mode.up, dropping.up), down=down, delay=DELAYS[mode.schedule], pushes=pushes,
    )  # fmt: skip
    if config.exchange.per == "node":
        return PerNode(server, wire, parameters)
    return OneChannel(server, wire) if config.exchange.one_channel_per_node else server


def _every_step(place: Place, exchange: Exchange) -> Schedule:
    return EveryStep(place.flat, exchange, place.config.optimizer.clip_norm, place.config.batch.accumulate)


def _overlapped(place: Place, exchange: Exchange) -> Schedule:
    return Overlap(place.flat, exchange, place.wire, place.trace, place.config.overlap, place.config.optimizer)


SCHEDULES: dict[str, Callable[[Place, Exchange], Schedule]] = {"every-step": _every_step, "overlapped": _overlapped}
DELAYS = {"every-step": 0, "overlapped": 1}  # exchanges that a gradient is behind
EXCHANGES: dict[str, Callable[[Place, Mode], Exchange]] = {"alone": _alone, "server": _server}
CODECS: dict[str, Callable[[DroppingConfig, float], Codec]] = {
    "dense": lambda config, dropped: Dense(),
    "half": lambda config, dropped: Dense(torch.float16),
    "top-k": TopK,
}
