"""Writes the checkpoints of a run while training continues, one at a time, in a task of its own.

Rank 0 fetches the other ranks' parts piece by piece and writes each piece at once, so it never holds more than one. A rank that
sees the checkpoint's folder, because machines share a disk, writes the state of its worker there itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nmt_train.common.duration import Mark, Pace
from nmt_train.common.errors import UserError
from nmt_train.common.message import Message, from_json, to_facts
from nmt_train.corpus.data_shard import Position, plain
from nmt_train.optim.flat_model import FlatModel
from nmt_train.run import checkpoint
from nmt_train.run.checkpoint import Draft
from nmt_train.run.folder import Run
from nmt_train.run.tensor_file import TensorFile
from nmt_train.strategy.state import GLOBAL, Vectors
from nmt_train.training.leader_state import LeaderState, frozen_part, named_generators
from nmt_train.training.snapshot import Header, PendingSnapshot, Piece, RankState
from nmt_train.training.worker import Worker
from nmt_train.transport import Future, Tag, Transport


class CheckpointWriter:
    """disk: whether other ranks may write to the run folder themselves; False in a simulation, which charges what they send."""

    def __init__(self, worker: Worker, run: Run, state: LeaderState, disk: bool) -> None:
        self._worker, self._transport, self._run, self._state, self._disk = worker, worker.transport, run, state, disk
        self._saved: tuple[int, Sequence[Position]] | None = None  # updates and positions of the newest checkpoint
        self._writing: Future[None] | None = None
        self._pace = Pace(worker.config.checkpoint.every, state.progress.mark())

    def due(self, now: Mark) -> bool:
        """Whether the interval says that a checkpoint is due."""
        return self._pace.due(now)

    def known(self, updates: int, positions: Sequence[Position]) -> None:
        """Record that the checkpoint from which training continues exists already."""
        self._saved = (updates, positions)

    def has(self, pending: PendingSnapshot) -> bool:
        """Whether exactly this snapshot has been written as a checkpoint, or will be."""
        return self._saved == (pending.own.numbers["updates"], pending.positions)

    def begin(self, pending: PendingSnapshot) -> None:
        """Begin to write a checkpoint; the previous one must be complete."""
        self._saved = (pending.own.numbers["updates"], pending.positions)
        facts = copy.deepcopy(self._state.facts(pending.own.numbers, self._worker.config))
        self._writing = self._transport.spawn("checkpoint", partial(self._write, pending, facts))

    def advance(self, wait: bool = False) -> None:
        """Raise the UserError of a checkpoint that could not be written; with `wait`, first wait until it is complete."""
        if self._writing is not None and (wait or self._writing.done()):
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, pending: PendingSnapshot, facts: dict[str, Any]) -> None:
        begun, update = self._transport.now(), pending.own.numbers["updates"]
        path = self._run.checkpoint(update)
        with checkpoint.draft(path, self._state.vocabulary) as draft:
            ranks = range(1, self._transport.size)
            for rank in ranks:
                folder = str(draft.folder.absolute()) if self._disk else ""
                self._transport.send(rank, Tag.STATE, from_json({"folder": folder}))
            for name, tensors in frozen_part(self._worker.flat).items():
                draft.add(name, tensors)
            files = _Files(draft, pending.own, self._worker.flat, update)
            files.add(0, pending.own.header, self._alive(pending.own.pieces(pending.own.header)), pending.slices[0])
            for rank in ranks:
                message = self._transport.receive(rank, Tag.STATE).result()[1]
                header, written = Header.unpack(message), to_facts(message, "written")["written"]
                if written:
                    draft.added(_file_of(rank), written)
                files.add(rank, header, header.read(partial(self._fetch, rank)), pending.slices[rank])
            draft.add("random", named_generators(files.random))
            positions = files.positions[: len(pending.positions)]
            draft.finish({**facts, "stages": plain([*map(list, pending.stages), positions])}, self._transport.now)
        self._run.link("last", path)
        self._run.prune(self._worker.config.checkpoint.keep)
        self._pace.took(pending.seconds + self._transport.now() - begun)

    def _alive(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """The same; each is a sign of life for the watchdog."""
        for piece in pieces:
            self._transport.now()
            yield piece

    def _fetch(self, rank: int) -> Message:
        """The next piece of this rank's part."""
        self._transport.send(rank, Tag.STATE, Message())
        return self._transport.receive(rank, Tag.STATE).result()[1]


class _Files:
    """The files of a checkpoint: global vectors by parameter, optimizer, and each rank's worker state and generators."""

    def __init__(self, draft: Draft, own: RankState, flat: FlatModel, update: int) -> None:
        self._draft, self._update = draft, update
        self.random: list[Vectors] = []
        self.positions: list[Position] = []
        elements = flat.parameters.numel()
        names = {name: own.shard[name].dtype for name in own.shard}
        optimizer = draft.create("optimizer", {name: (t, (elements,)) for name, t in names.items() if name not in GLOBAL})
        self._vectors: dict[str, tuple[TensorFile, str]] = {}  # by vector: its file, and the first tensor in it
        for name, dtype in names.items():
            if name in GLOBAL:
                file = draft.create(name, {parameter: (dtype, shape) for parameter, shape in flat.layout})
                self._vectors[name] = (file, flat.layout[0][0])
            else:
                self._vectors[name] = (optimizer, name)

    def add(self, rank: int, header: Header, pieces: Iterator[Piece], place: slice) -> None:
        """Write one rank's part. place: its slice of the parameters. Raises UserError if parameters are not finite."""
        layout = {name: (dtype, (length,)) for name, (dtype, length) in header.vectors["worker_state"].items()}
        own = self._draft.create(_file_of(rank), layout) if layout else None
        self.random.append({})
        self.positions.append(header.position)
        for piece in pieces:
            if piece.group == "random":
                before = [self.random[rank][piece.name]] if piece.start else []
                self.random[rank][piece.name] = torch.cat([*before, piece.values])
            elif piece.group == "worker_state" and own is not None:
                own.write(piece.name, piece.values, piece.start)
            else:
                if piece.name == "parameters" and not bool(piece.values.isfinite().all()):
                    raise UserError(
                        f"update {self._update}: parameters are not finite; earlier checkpoints are intact: lower"
                        " optimizer.learning_rate or lengthen optimizer.warmup"
                    )
                file, first = self._vectors[piece.name]
                file.write(first, piece.values, place.start + piece.start)


def hand_over(transport: Transport, part: RankState) -> None:
    """Give this rank's part to rank 0, piece by piece when it asks, for a checkpoint."""
    request = transport.receive(0, Tag.STATE).result()[1]
    header, folder = part.header, to_facts(request, "folder")["folder"]
    written = _write_here(Path(folder), transport, part) if folder else None
    if written:
        header = header.without("worker_state")
    transport.send(0, Tag.STATE, header.pack(written=written)).result()
    for piece in part.pieces(header):
        transport.receive(0, Tag.STATE).result()
        transport.send(0, Tag.STATE, Message((), (piece.values,))).result()


def _write_here(folder: Path, transport: Transport, part: RankState) -> dict[str, Any] | None:
    """Write the worker's state to rank 0's folder; None if there is none, or this machine cannot write to that folder."""
    vectors = part.worker_state.vectors()
    if not vectors or not folder.is_dir():
        return None
    path = folder / f"{_file_of(transport.rank)}.safetensors"
    try:
        file = TensorFile(path, {name: (vector.dtype, vector.shape) for name, vector in vectors.items()})
        for name, vector in vectors.items():
            file.write(name, vector)
            transport.now()  # a sign of life
        return file.close()
    except OSError:  # rank 0 will meet the same problem, and say what it is, or not have it
        return None


def _file_of(rank: int) -> str:
    return f"worker-{rank}"
