"""Measures how long each kind of work takes on this device, by training; the result is the `device` of a cluster file."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nmt_train.common.message import Message
from nmt_train.config import Config
from nmt_train.modes.auto import with_mode
from nmt_train.simulation import codec_costs
from nmt_train.simulation.cluster import Cost, DeviceConfig
from nmt_train.training.worker import Make
from nmt_train.transport import Tag, Transport
from nmt_train.transport.collective import barrier
from nmt_train.transport.local import LocalTransport

# The mode in which each kind of work is measured: a mode in which no other work uses the device at the same time.
_MODES = {"single": ("forward", "backward"), "sparse": ("update", "encode", "decode"), "overlap": ("swap",)}
_BY_TOKENS = ("forward", "backward")
_UNUSUAL = 3.0  # times the median: what takes longer per token is left out
_FEWEST = 5  # steps of a series: a line is fitted through them
_ROUNDS = 5
_BLOCK, _WINDOW = 1 << 20, 4  # bytes of each message of the test traffic, and how many are in flight
_PAUSE = 0.005  # seconds between an answer and the next question: after a message, the progress thread looks often for the next

Say = Callable[[str], None]
Done = dict[str, list[tuple[float, float]]]  # for each kind of work: (amount, seconds)


def nothing(what: str) -> None:
    """Do not say what is measured."""


@dataclass(frozen=True)
class Effort:
    """How long to measure: `steps` for each kind of work, after `settling` ones that do not count; `rounds` beside traffic.

    seconds: no step begins later than this in a series of steps, unless there would be too few; no round begins later than
    _ROUNDS times as many seconds after the first one.
    """

    steps: int
    settling: int = 3
    rounds: int = 3
    seconds: float = math.inf


def measure(config: Config, make: Make, transport: Transport, effort: Effort, say: Say) -> DeviceConfig:
    """Train with the workers that `make` builds for some steps in each of several modes; return the costs.

    If `transport` has several ranks, all of them measure at the same time. They then measure again while they send
    each other data at full network speed, for the cost `carry`. `say` is told what is measured. Raises UserError for errors
    in the configuration.
    """
    costs: dict[str, Any] = {}
    for mode, kinds in _MODES.items():
        say(f"measuring how long this device takes: {', '.join(kinds)}")
        done, mean, costs["parameters"] = _train(config, mode, make, effort)
        for kind in kinds:
            costs[kind] = _by_tokens(typical(done[kind])) if kind in _BY_TOKENS else _by_elements(done[kind])
        if mode == "single":  # time of a step outside the recorded work, such as assembling batches
            beside = mean - sum(took for times in done.values() for _, took in times) / len(done["forward"])
            forward = costs["forward"]
            costs["forward"] = dataclasses.replace(forward, seconds=forward.seconds + max(0.0, beside))
    say(f"measuring how long this device takes: {', '.join(codec_costs.MEASURED)}")
    costs["codecs"] = codec_costs.measure(config, make, transport, effort.steps)
    if not costs["codecs"]:
        say("the memory of this device is too small to measure these codecs: they will be charged as top-k")
    if transport.size > 1:
        costs["carry"], costs["response"] = _carrying(config, make, transport, effort, say)
    return DeviceConfig(**costs)


class _Watched(LocalTransport):
    """The transport of a single rank that records the work it does."""

    def __init__(self) -> None:
        super().__init__()
        self.done: Done = defaultdict(list)

    def spend(self, name: str, work: float, seconds: float, parts: float = 1) -> None:
        self.done[name].append((work, seconds))


class _Steps:
    """Makes a worker take its steps, of which the first few are not measured."""

    def __init__(self, transport: _Watched, effort: Effort) -> None:
        self._transport, self._effort, self._taken = transport, effort, -effort.settling
        self._start = self._end = 0.0

    def should_continue(self) -> bool:
        self._end = self._transport.now()
        if self._taken == 0:
            self._start = self._end
            self._transport.done.clear()
        late = self._taken >= _FEWEST and self._end - self._start > self._effort.seconds
        return self._taken < self._effort.steps and not late

    @property
    def mean(self) -> float:
        """Seconds of a step."""
        return (self._end - self._start) / self._taken

    def step_done(self, updated: bool) -> None:
        self._taken += 1

    def skipped(self, what: str) -> None:
        """Do nothing: a skipped update takes time, too."""


def _train(config: Config, mode: str, make: Make, effort: Effort) -> tuple[Done, float, int]:
    """Returns what was done, the seconds of a step, and the number of the model's parameters."""
    apart = {} if mode == "single" else {"server.bypass": "none"}
    config = dataclasses.replace(with_mode(config, mode, apart), trace=True)  # so that spans wait for the work of a GPU
    transport = _Watched()
    worker = make(config, transport)
    worker.strategy.refresh()
    coordinator = _Steps(transport, effort)
    worker.run(coordinator)
    worker.strategy.drain()
    transport.close()
    return transport.done, coordinator.mean, worker.flat.parameters.numel()


def _carrying(config: Config, make: Make, transport: Transport, effort: Effort, say: Say) -> tuple[Cost, float]:
    """The extra time that training takes while messages are transferred, per message and per byte; the response time [s].

    Each round measures three times: without messages, with short ones now and then, and with long ones all the time.
    """

    def pace() -> float:
        done, *_ = _train(config, "single", make, effort)
        return sum(statistics.mean(took / work for work, took in typical(done[kind])) for kind in _BY_TOKENS)

    costs: dict[type[_Traffic], list[float]] = {_Questions: [], _Blocks: []}  # seconds of the device that a message takes
    responses, began = [], transport.now()
    for number in range(1, effort.rounds + 1):
        late = number > 1 and transport.now() - began > _ROUNDS * effort.seconds
        if barrier(transport, int(late)):  # rank 0 decides
            break
        say(f"measuring how much messages slow devices down, {number} of at most {effort.rounds}")
        alone = pace()
        for kind, found in costs.items():
            barrier(transport)
            start, traffic = transport.now(), kind(transport)
            beside = pace()
            seconds = transport.now() - start
            found.append((1 - alone / beside) * seconds / max(1, traffic.stop()))
            if isinstance(traffic, _Questions):
                responses.append(statistics.mean(traffic.times))
    short, long = (max(0.0, statistics.median(found)) for found in costs.values())
    return Cost(short, max(0.0, long - short) / _BLOCK), statistics.median(responses)


class _Traffic(ABC):
    """Two tasks that send messages to the next rank and receive those of the previous one until all ranks stop."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self._on, self._messages = transport, True, 0
        self._next, self._previous = ((transport.rank + step) % transport.size for step in (1, -1))
        self._tasks = [transport.spawn("sender", self._send), transport.spawn("receiver", self._receive)]

    def stop(self) -> int:
        """Return the number of messages sent and received so far, and stop; wait until the other ranks stop, too."""
        so_far, self._on = self._messages, False
        for task in self._tasks:
            task.result()
        return so_far

    @abstractmethod
    def _send(self) -> None:
        """Send to the next rank until `_on` is false; then tell it."""

    @abstractmethod
    def _receive(self) -> None:
        """Receive what the previous rank sends until it says that it stops."""


class _Blocks(_Traffic):
    """Long messages, as fast as possible."""

    def _send(self) -> None:
        block, under_way = Message((1,), (torch.zeros(_BLOCK, dtype=torch.uint8),)), deque[Any]()
        while self._on:
            under_way.append(self._transport.send(self._next, Tag.PUSH, block))
            if len(under_way) == _WINDOW:
                under_way.popleft().result()
                self._messages += 1
        self._transport.send(self._next, Tag.PUSH, Message((0,)))

    def _receive(self) -> None:
        while self._transport.receive(self._previous, Tag.PUSH).result()[1].number():
            self._messages += 1


class _Questions(_Traffic):
    """Short messages now and then, each answered at once. times: from a question to its answer, half of it, so one way [s]."""

    def __init__(self, transport: Transport) -> None:
        self.times = list[float]()
        super().__init__(transport)

    def _send(self) -> None:
        while self._on or not self.times:
            start = self._transport.now()
            self._transport.send(self._next, Tag.PUSH, Message((1,)))
            self._transport.receive(self._next, Tag.ANSWER).result()
            self.times.append((self._transport.now() - start) / 2)
            self._messages += 2
            time.sleep(_PAUSE)
        self._transport.send(self._next, Tag.PUSH, Message((0,)))

    def _receive(self) -> None:
        while self._transport.receive(self._previous, Tag.PUSH).result()[1].number():
            self._transport.send(self._previous, Tag.ANSWER, Message())
            self._messages += 2


def typical(times: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out steps that took much longer than others: a model was compiled for a new shape, or the machine was busy.

    times: the amount of work and the seconds of each.
    """
    longest = _UNUSUAL * statistics.median(seconds / amount for amount, seconds in times)
    return [(amount, seconds) for amount, seconds in times if seconds <= longest * amount]


def _by_tokens(times: list[tuple[float, float]]) -> Cost:
    """Fit a straight line to the measurements; if its intercept or slope would be negative, fit one through the origin."""
    tokens, seconds = np.array(times).T
    slope, start = np.polyfit(tokens, seconds, 1) if np.ptp(tokens) > 0 else (0.0, float(seconds.mean()))
    if start < 0 or slope < 0:
        start, slope = 0.0, float(seconds.sum() / tokens.sum())
    return Cost(float(start), float(slope))


def _by_elements(times: list[tuple[float, float]]) -> Cost:
    return Cost(0.0, statistics.median(seconds / elements for elements, seconds in times))
