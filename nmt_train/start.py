"""Begin a run, or continue it where it stopped; and sum it up at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nmt_train import __version__, checkpoint, device, launch, modes
from nmt_train import config as configuration
from nmt_train.checkpoint import Checkpoint
from nmt_train.config import Config
from nmt_train.corpus.store import Store, open_store
from nmt_train.corpus.text import read_lines, read_pairs, sides
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.corpus.vocabulary import train as train_vocabulary
from nmt_train.errors import UserError
from nmt_train.follow import Follower
from nmt_train.lead import Leader, handling
from nmt_train.log import Log, rewind_metrics
from nmt_train.message import Message, from_bytes, from_json, to_bytes, to_json
from nmt_train.progress import Progress
from nmt_train.run import Run
from nmt_train.state import Snapshot, State
from nmt_train.stop import Patience
from nmt_train.train import Worker
from nmt_train.validate import TestSet
from nmt_train.wire import Aborted, Tag, Wire, WireConfig, describe
from nmt_train.wire.threads import ThreadWire

# What may differ between ranks without harm.
_LOCAL = ("run", "threads", "devices", "corpus.train", "corpus.valid")


def start(config: Config, force: bool, overwrite: bool, arguments: Sequence[str] = ()) -> int:
    """Train as `config` says; returns the exit status: 0, or 128 + the signal that ended it.

    force: continue although the configuration changed; overwrite: forget what the run folder holds; arguments: of the command,
    to run it again as several ranks. UserError for all that a user can mend; the run folder is then as it was.
    """
    devices = check(config)
    if len(devices) > 1 and not launch.launched():
        return launch.mpirun(len(devices), arguments)
    wire = _wire(config.wire)
    try:
        status = _lead(config, wire, force, overwrite) if wire.rank == 0 else _follow(config, wire)
    except Aborted:
        return 1  # the rank that failed has said why
    except BaseException as error:
        wire.fail(error)
        if isinstance(error, UserError) and wire.rank:
            raise type(error)(f"{describe(wire, wire.rank)}: {error}") from error
        raise
    wire.close()
    return status


def check(config: Config) -> list[torch.device]:
    """The devices of this machine; UserError for what is wrong on every rank alike, before they meet."""
    devices = device.choose(config.devices)
    modes.check(config, (0,) * len(devices))
    return devices


def _wire(config: WireConfig) -> Wire:
    if not launch.launched():
        return ThreadWire()
    from nmt_train.wire.mpi import Mpi

    return Mpi(config)


def _lead(config: Config, wire: Wire, force: bool, overwrite: bool) -> int:
    own = device.prepare(config.devices, config.threads, wire.nodes, wire.rank)
    modes.check(config, wire.nodes)
    _check_early(config)
    run = Run.open(Path(config.run).expanduser())
    try:
        saved, damaged = (None, []) if overwrite else _newest(run)
        if saved is not None:
            _compare(saved, config, force)
        vocabulary = _vocabulary(run, config, saved, overwrite)
        store = open_store(config.corpus.train, "corpus.train", vocabulary, run.folder / "store")
        _agree(config, wire, vocabulary, store)
        worker = Worker(config, wire, own, vocabulary, store)
        test_set = TestSet(config.corpus.valid, "corpus.valid", vocabulary)
        state = State(Progress(), Patience(config.stop))
        if saved is not None:
            snapshot = state.load(saved, worker.flat, bool(config.optimizer.smoothing), vocabulary)
        else:
            fresh = {"updates": 0, "factor": 1.0, "torch": {}}
            snapshot = Snapshot({"parameters": worker.flat.parameters.clone()}, fresh, [], [], [])
        if overwrite:
            run.empty()
        run.begin(configuration.to_yaml(config), vocabulary.model)
        rewind_metrics(run.folder / "metrics.jsonl", state.progress.updates)
        log = Log.open(run.folder, config.log)
        try:
            leader = Leader(worker, run, log, state, test_set)
            leader.begin(snapshot)
            _introduce(worker, log, saved, damaged)
            with leader.signals():
                leader.first()
                worker.run(leader)
            _summary(leader, state, run, log)
        finally:
            log.close()
    finally:
        run.close()
    return 128 + leader.signal if leader.signal and wire.size == 1 else 0


def _follow(config: Config, wire: Wire) -> int:
    own = device.prepare(config.devices, config.threads, wire.nodes, wire.rank)
    vocabulary = _accept(config, wire)
    first = wire.nodes.index(wire.nodes[wire.rank])
    if first != wire.rank:
        wire.receive(first, Tag.HELLO).result()  # it has made the store
    store = open_store(config.corpus.train, "corpus.train", vocabulary, Path(config.run).expanduser() / "store")
    for rank in range(wire.rank + 1, wire.size):
        if first == wire.rank and wire.nodes[rank] == wire.nodes[first]:
            wire.send(rank, Tag.HELLO, Message())
    wire.send(0, Tag.HELLO, from_json(_identity(config, store)))
    worker = Worker(config, wire, own, vocabulary, store)
    follower = Follower(worker)
    with handling(follower.ask):
        follower.begin()
        worker.run(follower)
    return 0


def _agree(config: Config, wire: Wire, vocabulary: Vocabulary, store: Store) -> None:
    """Give the vocabulary to the other ranks; UserError names the first that has another code, configuration or corpus."""
    for rank in range(1, wire.size):
        wire.send(rank, Tag.HELLO, from_bytes(vocabulary.model))
    for rank in range(1, wire.size):
        if wire.nodes[rank] == wire.nodes[0]:
            wire.send(rank, Tag.HELLO, Message())  # the store of this machine is made
    mine = _identity(config, store)
    for rank in range(1, wire.size):
        theirs = to_json(wire.receive(rank, Tag.HELLO).result()[1])
        for what, value in mine.items():
            if value != theirs[what]:
                differing = f"{theirs[what]} there, {value} on rank 0"
                raise UserError(
                    f"{describe(wire, rank)} disagrees with rank 0 (host {wire.hosts[0]}): {what}: {differing}; all ranks need"
                    " the same version, configuration and corpus"
                )


def _accept(config: Config, wire: Wire) -> Vocabulary:
    """Rank 0's vocabulary; UserError if this rank was given another one."""
    vocabulary = Vocabulary(to_bytes(wire.receive(0, Tag.HELLO).result()[1]), "rank 0's vocabulary")
    path = config.corpus.vocabulary.path
    if path and Path(path).expanduser().exists() and Vocabulary.load(path).digest != vocabulary.digest:
        raise UserError(
            f"corpus.vocabulary.path: {path} is not the vocabulary of rank 0 (host {wire.hosts[0]}); copy that one here"
        )
    return vocabulary


def _identity(config: Config, store: Store) -> dict[str, Any]:
    """What all ranks must have in common, in the order in which differences are named."""
    code = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        code.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    leaves = configuration.flatten(configuration.plain(config))
    same = {f"configuration key {name}": value for name, value in leaves.items() if not name.startswith(_LOCAL)}
    return {
        "version": __version__, "code (its checksum)": code.hexdigest()[:12], **same,
        "corpus.train (pairs)": len(store), "corpus.train (checksum)": store.checksum(),
    }  # fmt: skip


def _check_early(config: Config) -> None:
    """What would be a pity to find only after a vocabulary was trained and a corpus tokenised."""
    for path in (path for side in sides(config.corpus.train, "corpus.train") for path in side):
        next(read_lines(path), None)
    for _ in read_pairs(config.corpus.valid, "corpus.valid"):
        pass


def _introduce(worker: Worker, log: Log, saved: Checkpoint | None, damaged: list[str]) -> None:
    for complaint in damaged:
        log.say(f"warning: {complaint}")
    config, batches, wire = worker.config, worker.batches, worker.wire
    where = "" if wire.size == 1 else f", {wire.size} ranks on {', '.join(dict.fromkeys(wire.hosts))}"
    log.say(
        f"{worker.flat.parameters.numel():,} parameters, {len(worker.vocabulary):,} pieces, mode {config.mode} on"
        f" {worker.device}, {config.precision}, {torch.get_num_threads()} threads{where}"
    )
    log.say(f"corpus: {len(batches):,} pairs; left out: {batches.left_out}; tokenised in {batches.store.path}")
    if saved is not None:
        log.say(f"continuing from {saved.path} at update {worker.progress.updates:,}")


def _newest(run: Run) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that passes verification, and what is wrong with newer ones."""
    damaged: list[str] = []
    for path in reversed(run.checkpoints()):
        try:
            return checkpoint.load(path), damaged
        except UserError as error:
            damaged.append(str(error))
    if damaged:
        raise UserError(f"{damaged[0]}; no checkpoint of the run is whole: start anew with --overwrite")
    return None, []


def _compare(saved: Checkpoint, config: Config, force: bool) -> None:
    changed = configuration.differences(saved.facts["config"], config)
    if changed and not force:
        raise UserError(
            f"run: {config.run} was started with another configuration: {'; '.join(changed)}; restore it, choose another run"
            " folder, or continue all the same with --force"
        )


def _vocabulary(run: Run, config: Config, saved: Checkpoint | None, overwrite: bool) -> Vocabulary:
    """The run's vocabulary: the one it has (unless it is to be forgotten), else a given one, else one trained on the corpus."""
    path, wanted = run.folder / "vocabulary.model", config.corpus.vocabulary
    given = Vocabulary.load(wanted.path) if wanted.path else None
    if overwrite or not path.exists():
        return given or (saved.vocabulary() if saved else train_vocabulary(config.corpus))
    vocabulary = Vocabulary.load(path)
    if given is not None and given.digest != vocabulary.digest:
        raise UserError(
            f"corpus.vocabulary.path: {wanted.path} is not the vocabulary that run {run.folder} began with ({path})"
        )
    if given is None and saved is None and len(vocabulary) != wanted.size:
        raise UserError(
            f"{path}: has {len(vocabulary)} pieces, but corpus.vocabulary.size is {wanted.size}; delete it, or name it as"
            " corpus.vocabulary.path"
        )
    return vocabulary


def _summary(leader: Leader, state: State, run: Run, log: Log) -> None:
    progress, say, folder = state.progress, log.say, run.folder
    hours, seconds = divmod(round(progress.seconds), 3600)
    say(f"stopped: {leader.reason}")
    for metric, verdict in state.patience.verdicts.items():
        say(f"best {metric} {verdict.best:.4f}: {folder / f'best-{metric}'}")
    say(
        f"{progress.updates:,} updates, {progress.epochs} epochs, {progress.tokens:,} words in"
        f" {hours}:{seconds // 60:02}:{seconds % 60:02}, {progress.tokens / max(progress.training_seconds, 1e-9):.0f} words/s"
        " without validation"
    )
    say(f"everything is in {folder}; translate with: nmt-translate --model {folder} < in > out")
