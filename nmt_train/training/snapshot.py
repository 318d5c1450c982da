"""The state that a run continues from: gathered for a checkpoint and restored from one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt_train import __version__
from nmt_train import config as configuration
from nmt_train.common.errors import UserError
from nmt_train.config import Config
from nmt_train.corpus.data_shard import Position, from_plain, plain, resume
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.distributed.exchange.exchange import OPTIMIZER, RESIDUAL, UNSENT
from nmt_train.distributed.message import Message, from_json, to_json
from nmt_train.distributed.transport import Future
from nmt_train.optim.flat_model import FlatModel
from nmt_train.optim.update_optimizers import OUTER
from nmt_train.run import checkpoint
from nmt_train.run.checkpoint import Checkpoint
from nmt_train.run.progress import Progress
from nmt_train.run.stopping import Patience

Vectors = dict[str, Tensor]


@dataclasses.dataclass
class RankState:
    """One rank's part of the state that a run continues from; rank 0 also sends such parts at the start.

    Parts, snapshots, recovery pieces and received messages are on the CPU, on whatever device ranks compute. The code that
    creates one copies the device's vectors to the CPU (`flat_model.kept`); the code that loads one copies them to its device.

    shard: slices of `parameters`, `smoothed` (if there is one) and the optimizer's vectors.
    worker_state: vectors that the worker keeps, in full length. random: the states of torch's random number generators.
    numbers: the optimizer's counters. position: the worker's position in the data.
    """

    shard: Vectors
    worker_state: Vectors
    random: Vectors
    numbers: dict[str, Any]
    position: Position

    def pack(self) -> Message:
        groups = {name: getattr(self, name) for name in ("shard", "worker_state", "random")}
        tensors = [tensor for group in groups.values() for tensor in group.values()]
        facts: dict[str, Any] = {name: list(group) for name, group in groups.items()}
        facts |= {"numbers": self.numbers, "position": dataclasses.astuple(self.position)}
        return Message((), (*from_json(facts).tensors, *tensors))

    @classmethod
    def unpack(cls, message: Message) -> RankState:
        with message.understood():
            facts, tensors = to_json(message), iter(message.tensors[1:])
            shard, worker_state, random = (
                {name: next(tensors) for name in facts[group]} for group in ("shard", "worker_state", "random")
            )
            return cls(shard, worker_state, random, facts["numbers"], Position(*facts["position"]))


@dataclasses.dataclass
class Snapshot:
    """Everything that training changes, of all ranks at one moment: global flat vectors (elements,) and each worker's state.

    stages: lists of the positions where the workers stopped in the data: first those of earlier starts with other numbers of
    workers, last the present ones.
    """

    vectors: Vectors
    numbers: dict[str, Any]
    worker_state: list[Vectors]
    random: list[Vectors]
    stages: list[list[Position]]

    @classmethod
    def join(
        cls,
        parts: list[RankState],
        shards: list[slice],
        elements: int,
        stages: Sequence[Sequence[Position]],
        workers: int | None = None,
    ) -> Snapshot:
        """Join the parts of all ranks. workers: how many of the ranks train (None: all)."""
        if len(parts) == 1:
            vectors = parts[0].shard
        else:
            vectors = {name: torch.empty(elements) for name in parts[0].shard}
            for part, place in zip(parts, shards, strict=True):
                for name, vector in part.shard.items():
                    vectors[name][place] = vector
        positions = [*map(list, stages), [part.position for part in parts[:workers]]]
        return cls(vectors, parts[0].numbers, [p.worker_state for p in parts], [p.random for p in parts], positions)

    def with_optimizer_at(self, exchanges_updates: bool) -> Snapshot:
        """The same snapshot with the optimizer's vectors at every worker (if `exchanges_updates`), or else at the shards."""
        return self._with_workers() if exchanges_updates else self._with_shards()

    def _with_workers(self) -> Snapshot:
        mine = {name: vector for name, vector in self.vectors.items() if not _stays(name)}
        if not mine:
            return self
        steps = {name: torch.tensor([value]) for name, value in self.numbers["torch"].items()}
        moved = {OPTIMIZER + name: vector for name, vector in (mine | steps).items()}
        kept = {name: vector for name, vector in self.vectors.items() if _stays(name)}
        others = [_without(worker_state, OPTIMIZER) | moved for worker_state in self.worker_state or [{}]]
        return dataclasses.replace(self, vectors=kept, numbers=self.numbers | {"torch": {}}, worker_state=others)

    def _with_shards(self) -> Snapshot:
        vectors, numbers = _without(self.vectors, OUTER), self.numbers
        for worker_state in self.worker_state:
            if UNSENT in worker_state:  # finished updates that were not sent: apply them now
                vectors["parameters"] = vectors["parameters"] + worker_state[UNSENT]
        others = [_without(worker_state, UNSENT) for worker_state in self.worker_state]
        theirs = {name: v for name, v in (others or [{}])[0].items() if name.startswith(OPTIMIZER)}
        if theirs and not vectors.keys() - set(_PARAMETERS):
            named = {name.removeprefix(OPTIMIZER): vector for name, vector in theirs.items()}
            counts = {name: float(v) for name, v in named.items() if v.shape != vectors["parameters"].shape}
            vectors |= {name: vector for name, vector in named.items() if name not in counts}
            numbers, others = numbers | {"torch": counts}, [_without(worker_state, OPTIMIZER) for worker_state in others]
        return dataclasses.replace(self, vectors=vectors, numbers=numbers, worker_state=others)

    def split(
        self, shards: list[slice], exchanging: Sequence[int] | None = None, workers: int | None = None
    ) -> list[RankState]:
        """Split the snapshot into one part for each of `shards`. workers: how many of these ranks train (None: all).

        exchanging: the ranks that exchange (None: all that train). They also take over what other workers still owe: workers
        that no longer exist or do not exchange.
        """
        parts = []
        training = len(shards) if workers is None else workers
        for rank, place in enumerate(shards):
            position = resume(rank, self.stages, training)[1]
            random = self.random[rank] if rank < len(self.random) else {}
            shard = {name: vector[place] for name, vector in self.vectors.items()}
            worker_state = self._carried_by(rank, range(training) if exchanging is None else exchanging)
            parts.append(RankState(shard, worker_state, random, self.numbers, position))
        return parts

    def _carried_by(self, rank: int, exchanging: Sequence[int]) -> Vectors:
        if not self.worker_state:
            return {}
        mine = self.worker_state[rank % len(self.worker_state)]
        if not any(name.startswith(OPTIMIZER) for name in mine):  # it has not exchanged yet: use another worker's
            with_optimizer = [c for c in self.worker_state if any(name.startswith(OPTIMIZER) for name in c)]
            mine = mine | {name: v for c in with_optimizer[:1] for name, v in c.items() if name.startswith(OPTIMIZER)}
        mine = _without(_without(mine, RESIDUAL), UNSENT)
        for name in (RESIDUAL, UNSENT):
            from_ranks = [old for old in range(len(self.worker_state)) if exchanging[old % len(exchanging)] == rank]
            owed = [self.worker_state[old][name] for old in from_ranks if name in self.worker_state[old]]
            if owed:
                mine[name] = owed[0] if len(owed) == 1 else torch.stack(owed).sum(0)
        return mine


class PendingSnapshot:
    """A snapshot that is being assembled: `own` is this rank's part; the other ranks' parts are still arriving."""

    def __init__(
        self, own: RankState, coming: Sequence[Future[tuple[int, Message]]], shards: list[slice],
        stages: Sequence[Sequence[Position]], positions: Sequence[Position],
    ) -> None:  # fmt: skip
        self.own, self.positions = own, [Position(**vars(position)) for position in positions]
        self._coming, self._shards, self._stages = coming, shards, stages
        self._snapshot: Snapshot | None = None

    def whole(self) -> bool:
        return all(part.done() for part in self._coming)

    def snapshot(self) -> Snapshot:
        """The whole snapshot; waits for the missing parts."""
        if self._snapshot is None:
            parts = [self.own, *(RankState.unpack(part.result()[1]) for part in self._coming)]
            elements = sum(place.stop - place.start for place in self._shards)
            self._snapshot = Snapshot.join(parts, self._shards, elements, self._stages, len(self.positions))
        return self._snapshot


@dataclasses.dataclass
class State:
    """What only rank 0 keeps, in addition to the snapshot; validation_pending: a requested validation is not finished yet."""

    progress: Progress
    patience: Patience
    vocabulary: Vocabulary
    validation_pending: bool = False

    def facts(self, numbers: dict[str, Any], config: Config) -> dict[str, Any]:
        """What a checkpoint contains besides vectors, as of now; numbers: the optimizer's counters."""
        return {"version": __version__, "config": configuration.plain(config), **self.own(), "optimizer": numbers}

    def own(self) -> dict[str, Any]:
        """What only rank 0 knows, as JSON."""
        return {
            "progress": self.progress.state(),
            "patience": self.patience.state(),
            "validation_pending": self.validation_pending,
        }

    def load_facts(self, own: Mapping[str, Any]) -> None:
        """Restore what `own` returned."""
        self.progress = Progress(**own["progress"])
        self.patience.load(own["patience"])
        self.validation_pending = bool(own["validation_pending"])

    def save(self, path: Path, snapshot: Snapshot, facts: dict[str, Any], flat: FlatModel) -> None:
        """Write a complete checkpoint to `path`, or none; raise UserError if writing fails."""
        tensors: dict[str, dict[str, Tensor]] = {"optimizer": {}}
        for name, vector in snapshot.vectors.items():
            if name in _PARAMETERS:
                tensors[name] = flat.named(vector)
            else:
                tensors["optimizer"][name] = vector
        tensors["random"] = {_keyed(name, r): t for r, group in enumerate(snapshot.random) for name, t in group.items()}
        for rank, worker_state in enumerate(snapshot.worker_state):
            if worker_state:
                tensors[f"worker-{rank}"] = worker_state
        checkpoint.save(path, tensors, {**facts, "stages": plain(snapshot.stages)}, self.vocabulary)

    def save_best(self, path: Path, vector: Tensor, numbers: dict[str, Any], config: Config, flat: FlatModel) -> None:
        """Write a checkpoint of only the parameters, for translation, not for continuing; raise UserError as `save` does."""
        facts = self.facts(numbers, config) | {"parameters_only": True}
        checkpoint.save(path, {"parameters": flat.named(vector)}, facts, self.vocabulary)

    def load(self, saved: Checkpoint, flat: FlatModel, smoothing: bool) -> Snapshot:
        """Restore this state from a checkpoint and return the snapshot; raise UserError for another model or vocabulary."""
        where = str(saved.path)
        if saved.facts.get("stages") is None:
            raise UserError(f"{where}: holds parameters for translation only; continue from one of the run's checkpoints/")
        if saved.facts["vocabulary"] != self.vocabulary.digest:
            raise UserError(f"{where}: was trained with another vocabulary than the run's vocabulary.model; restore that one")
        parameters = torch.empty_like(flat.parameters, device="cpu")
        flat.load(saved.tensors("parameters"), parameters, where)
        vectors = {"parameters": parameters, **saved.tensors("optimizer")}
        if smoothing:
            vectors["smoothed"] = torch.empty_like(parameters)
            flat.load(saved.tensors("smoothed" if saved.has("smoothed") else "parameters"), vectors["smoothed"], where)
        for name, vector in vectors.items():
            if vector.shape != parameters.shape:
                file = f"{where}/optimizer.safetensors"
                raise UserError(f"{file}: {name} has {vector.numel()} elements instead of {parameters.numel()}")
        self.load_facts(saved.facts)
        stages = from_plain(saved.facts["stages"])
        ranks = range(len(stages[-1]))
        random = saved.tensors("random")
        generators = [{name: random[_keyed(name, r)] for name in _GENERATORS if _keyed(name, r) in random} for r in ranks]
        worker_state = [saved.tensors(f"worker-{rank}") if saved.has(f"worker-{rank}") else {} for rank in ranks]
        return Snapshot(vectors, saved.facts["optimizer"], worker_state, generators, stages)


_GENERATORS = ("cpu", "cuda")
_PARAMETERS = ("parameters", "smoothed")


def _stays(name: str) -> bool:
    """Whether a vector always stays with the shards, no matter where the optimizer runs."""
    return name in _PARAMETERS or name.startswith(OUTER)


def _without(vectors: Vectors, prefix: str) -> Vectors:
    return {name: vector for name, vector in vectors.items() if not name.startswith(prefix)}


def _keyed(name: str, rank: int) -> str:
    return f"{name}-{rank}" if rank else name
