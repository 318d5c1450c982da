"""The table: a mode is a schedule (when) and an exchange (with whom). Add a mode by adding its files and one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nmt_train.corpus import BatchConfig
from nmt_train.errors import UserError
from nmt_train.exchange import Exchange
from nmt_train.exchange.alone import Alone
from nmt_train.flat import Flat
from nmt_train.optim import Optimizer, OptimizerConfig
from nmt_train.schedule import Schedule
from nmt_train.schedule.every_step import EveryStep


@dataclass(frozen=True)
class Mode:
    """One row: names in the registries below, how many devices it can drive, and where it comes from."""

    schedule: str
    exchange: str
    devices: int
    source: str


MODES = {
    "single": Mode(schedule="every-step", exchange="alone", devices=1, source="thesis 3.1"),
}
SCHEDULES: dict[str, Callable[[Flat, Exchange, float, int], Schedule]] = {"every-step": EveryStep}
EXCHANGES: dict[str, Callable[[Optimizer], Exchange]] = {"alone": Alone}


def check(name: str, devices: list[torch.device]) -> Mode:
    """The row `name`; UserError if there is none, or it cannot drive these devices."""
    if name not in MODES:
        raise UserError(f"mode: {name!r} is unknown; this version has {', '.join(MODES)}")
    mode = MODES[name]
    if len(devices) > mode.devices:
        names = ", ".join(map(str, devices))
        raise UserError(f"mode: {name} drives {mode.devices} device, but devices: names {names}; list only one")
    return mode


def build(mode: Mode, flat: Flat, optimizer: OptimizerConfig, batch: BatchConfig) -> Schedule:
    """The objects of a row, ready for the loop."""
    exchange = EXCHANGES[mode.exchange](Optimizer(optimizer, flat.parameters))
    return SCHEDULES[mode.schedule](flat, exchange, optimizer.clip_norm, batch.accumulate)
