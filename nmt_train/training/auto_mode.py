"""`mode: auto`: all ranks measure their machines, rank 0 chooses a mode with an adviser, and tells the others."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from nmt_train.common import atomic_file
from nmt_train.common.streams import tell
from nmt_train.common.yaml_file import flatten
from nmt_train.config import Config, plain, with_values
from nmt_train.corpus.store import Stores
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.modes.auto import part_of_mode, replaced
from nmt_train.modes.resolve import choose_mode
from nmt_train.run.checkpoint import Checkpoint
from nmt_train.run.folder import MACHINES
from nmt_train.training.config_changes import saved_keys
from nmt_train.training.worker import Make
from nmt_train.transport import Messages, Transport
from nmt_train.transport.collective import broadcast

_ALONE = "single"


@dataclass(frozen=True)
class Advice:
    """config: with the best mode for all machines. sentences: why. write: writes the comparison to a folder."""

    config: Config
    sentences: Sequence[str]
    write: Callable[[Path], None]


class Adviser(Protocol):
    """Knows how fast each mode is on the machines of a job. `cluster` is the text of a cluster file."""

    def measure(self, transport: Transport, own: torch.device, make: Make) -> str:
        """Measure the machines; all ranks call this together. Returns a cluster file on rank 0, and "" on the others."""

    def choose(self, cluster: str) -> Advice: ...

    def compare(self, cluster: str, devices: Sequence[int], config: Config) -> str:
        """A sentence: how the mode of `config` compares with the best one, on the given number of devices of each machine."""


Advisers = Callable[[Config, Vocabulary, Stores], Adviser]


@dataclass
class ChosenMode:
    """What a rank knows of the choice. config: with the mode. cluster: the text of a cluster file, or "" if there is none.

    hosts: the name of each machine. sentences and write: on rank 0, for the log and the run folder.
    """

    config: Config
    adviser: Adviser
    cluster: str
    hosts: Sequence[str]
    sentences: Sequence[str] = ()
    write: Callable[[Path], None] = lambda folder: None

    def review(self, ranks: Messages) -> str:
        """A sentence on the choice after ranks have been lost; empty if the machines were not measured."""
        if not self.cluster:
            return ""
        devices, left = [0] * len(self.hosts), list(self.hosts)
        for node in dict.fromkeys(ranks.nodes):
            place = left.index(ranks.hosts[ranks.nodes.index(node)])
            left[place] = ""  # another machine may have the same name
            devices[place] = ranks.nodes.count(node)
        return self.adviser.compare(self.cluster, devices, self.config)


def lead(
    config: Config, transport: Transport, own: torch.device, make: Make, adviser: Adviser, saved: Checkpoint | None, run: Path
) -> ChosenMode:
    """Choose as rank 0, and tell the other ranks, which call `follow`. Raises UserError if no mode works.

    saved: the run's newest checkpoint; a run that has begun keeps its mode, unless it has begun with a single rank. run: its
    folder.
    """
    kept = _kept(config, saved, transport.size)
    known = _known(run, transport) if kept is not None else ""
    look = transport.size > 1 and not known
    broadcast(transport, {"look": look})
    cluster = known
    if look:
        _say("measuring the machines")
        cluster = _header(transport) + adviser.measure(transport, own, make)
        _say("comparing the modes")
    choice = ChosenMode(config, adviser, cluster, _hosts(transport), write=lambda folder: _write(folder, cluster))
    if kept is not None:
        choice.config, choice.sentences = kept, [f"keeps {kept.mode}, with which the run began"]
        if look:
            choice.sentences.append(adviser.compare(cluster, list(Counter(transport.nodes).values()), kept))
    elif transport.size == 1:
        choice.config = dataclasses.replace(config, mode=_ALONE)
    else:
        advice = adviser.choose(cluster)
        choice.config, choice.sentences = advice.config, [*advice.sentences, *_ignored(config)]

        def write(folder: Path) -> None:
            _write(folder, cluster)
            try:
                advice.write(folder)
            except Exception as error:  # a picture that cannot be drawn is no reason not to train
                _say(f"warning: {folder}: the comparison of the modes was not written: {error}")

        choice.write = write
    broadcast(transport, {"part": part_of_mode(flatten(plain(choice.config))), "cluster": cluster})
    return choice


def follow(config: Config, transport: Transport, own: torch.device, make: Make, adviser: Adviser) -> ChosenMode:
    """Take part in what `lead` does, as another rank."""
    if broadcast(transport, {}, "look")["look"]:
        adviser.measure(transport, own, make)
    chosen = broadcast(transport, {}, "part", "cluster")
    return ChosenMode(with_values(config, chosen["part"]), adviser, chosen["cluster"], _hosts(transport))


def _kept(config: Config, saved: Checkpoint | None, size: int) -> Config | None:
    """The configuration with the mode of the run's newest checkpoint; None if a new one is to be chosen."""
    if saved is None:
        return None
    ranks = len(saved.facts["stages"][-1])
    kept = choose_mode(with_values(config, part_of_mode(saved_keys(saved.facts["config"]))), ranks)
    return None if kept.mode == _ALONE and ranks == 1 < size else kept


def _known(run: Path, transport: Transport) -> str:
    """The run's cluster file if it describes the present machines; else an empty text."""
    path = run / MACHINES
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return text if text.startswith(_header(transport)) else ""


def _header(transport: Transport) -> str:
    """The first line of a run's cluster file: its machines."""
    counts = Counter(transport.nodes).values()
    return f"# {', '.join(f'{host} x {count}' for host, count in zip(_hosts(transport), counts, strict=True))}\n"


def _write(folder: Path, cluster: str) -> None:
    if cluster:
        atomic_file.write(folder / MACHINES, cluster.encode())


def _ignored(config: Config) -> list[str]:
    keys = replaced(config)
    return [f"ignores {', '.join(keys)}: each mode is compared with settings of its own"] if keys else []


def _hosts(ranks: Messages) -> list[str]:
    """The host of each machine."""
    return [ranks.hosts[ranks.nodes.index(node)] for node in dict.fromkeys(ranks.nodes)]


def _say(what: str) -> None:
    tell(f"nmt-train: mode auto: {what}")  # the log is not open yet
