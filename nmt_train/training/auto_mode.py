"""`mode: auto`: all ranks measure their machines, rank 0 decides on a mode with an adviser, and tells the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from nmt_train.config import Config, plain
from nmt_train.corpus.store import Stores
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.distributed.message import from_json, to_facts
from nmt_train.distributed.transport import Messages, Tag, Transport
from nmt_train.modes.auto import part_of_mode, replaced, with_mode, with_part
from nmt_train.modes.build import choose_mode
from nmt_train.run.checkpoint import Checkpoint
from nmt_train.training.worker import Make

_ALONE = "single"
CLUSTER = "cluster.yml"  # in the run folder: the machines as measured


@dataclass(frozen=True)
class Advice:
    """config: with the best mode for all machines. sentences: why. write: writes the comparison to a folder."""

    config: Config
    sentences: Sequence[str]
    write: Callable[[Path], None]


class Adviser(Protocol):
    """Knows how fast each mode is on the machines of a job. `machines` are the contents of a cluster file."""

    def measure(self, transport: Transport, own: torch.device, make: Make) -> str:
        """Measure the machines; all ranks call this together. Returns them on rank 0, and an empty text on the others."""

    def choose(self, machines: str) -> Advice: ...

    def compare(self, machines: str, devices: Sequence[int], config: Config) -> str:
        """A sentence: how the mode of `config` compares with the best one, on so many devices of each machine."""


Advisers = Callable[[Config, Vocabulary, Stores], Adviser]


@dataclass
class Choice:
    """What a rank knows of a choice. config: with the chosen mode. machines: empty if they were not measured.

    hosts: the name of each measured machine. sentences and write: on rank 0, for the log and the run folder.
    """

    config: Config
    adviser: Adviser
    machines: str
    hosts: Sequence[str]
    sentences: Sequence[str] = ()
    write: Callable[[Path], None] = lambda folder: None

    def review(self, ranks: Messages) -> str:
        """A sentence on the choice after ranks have been lost; empty if the machines were not measured."""
        if not self.machines:
            return ""
        devices, left = [0] * len(self.hosts), list(self.hosts)
        for node in dict.fromkeys(ranks.nodes):
            place = left.index(ranks.hosts[ranks.nodes.index(node)])
            left[place] = ""  # another machine may have the same name
            devices[place] = ranks.nodes.count(node)
        return self.adviser.compare(self.machines, devices, self.config)


def lead(
    config: Config, transport: Transport, own: torch.device, make: Make, adviser: Adviser, saved: Checkpoint | None, run: Path
) -> Choice:
    """Choose as rank 0, and tell the other ranks, which call `follow`. Raises UserError if no mode works.

    saved: the run's newest checkpoint; a run that has begun keeps its mode, unless it was for a single rank. run: its folder.
    """
    ranks = len(saved.facts["stages"][-1]) if saved is not None else 0
    kept = choose_mode(with_part(config, part_of_mode(saved.facts["config"])), ranks) if saved is not None else None
    if kept is not None and kept.mode == _ALONE and transport.size > 1:
        kept = None
    look = transport.size > 1 and (kept is None or ranks != transport.size)
    for rank in range(1, transport.size):
        transport.send(rank, Tag.HELLO, from_json({"look": look}))
    machines = adviser.measure(transport, own, make) if look else ""
    if kept is not None:
        choice = _kept(kept, transport, adviser, machines, run)
    elif transport.size == 1:
        choice = Choice(with_mode(config, _ALONE, {}), adviser, "", transport.hosts)
    else:
        advice = adviser.choose(machines)
        sentences = [*advice.sentences, *_ignored(config)]
        choice = Choice(advice.config, adviser, machines, _hosts(transport), sentences, advice.write)
    chosen = {"part": part_of_mode(plain(choice.config)), "machines": choice.machines}
    for rank in range(1, transport.size):
        transport.send(rank, Tag.HELLO, from_json(chosen))
    return choice


def follow(config: Config, transport: Transport, own: torch.device, make: Make, adviser: Adviser) -> Choice:
    """Take part in what `lead` does, as another rank."""
    if to_facts(transport.receive(0, Tag.HELLO).result()[1], "look")["look"]:
        adviser.measure(transport, own, make)
    chosen = to_facts(transport.receive(0, Tag.HELLO).result()[1], "part", "machines")
    return Choice(with_part(config, chosen["part"]), adviser, chosen["machines"], _hosts(transport))


def _kept(config: Config, transport: Transport, adviser: Adviser, machines: str, run: Path) -> Choice:
    """The choice with which the run began. machines: empty if they are the same as then."""
    sentences = [f"keeps {config.mode}, with which the run began"]
    if machines:
        sentences.append(adviser.compare(machines, list(Counter(transport.nodes).values()), config))
    elif (run / CLUSTER).exists():
        machines = (run / CLUSTER).read_text(encoding="utf-8")
    return Choice(config, adviser, machines, _hosts(transport), sentences)


def _ignored(config: Config) -> list[str]:
    keys = replaced(config)
    return [f"ignores {', '.join(keys)}: each mode is compared with settings of its own"] if keys else []


def _hosts(ranks: Messages) -> list[str]:
    """The host of each machine."""
    return [ranks.hosts[ranks.nodes.index(node)] for node in dict.fromkeys(ranks.nodes)]
