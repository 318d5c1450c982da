"""The state that only rank 0 keeps, and how checkpoints are written and read."""

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
from nmt_train.corpus.data_shard import Position, from_plain
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.model.new_embeddings import with_new_pieces
from nmt_train.optim.flat_model import FlatModel, cpu_copy
from nmt_train.run import checkpoint
from nmt_train.run.checkpoint import Checkpoint
from nmt_train.run.progress import Progress
from nmt_train.run.stopping import Patience
from nmt_train.strategy.state import Vectors, WorkerState
from nmt_train.training.snapshot import Snapshot

_GENERATORS = ("cpu", "cuda")


@dataclasses.dataclass
class LeaderState:
    """The state that only rank 0 keeps.

    corpora: what identifies the training corpora. validation_pending: whether a requested validation is not finished yet.
    history: the checkpoints with whose parameters this run and its predecessors began (key `init`), oldest first.
    """

    progress: Progress
    patience: Patience
    vocabulary: Vocabulary
    corpora: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    validation_pending: bool = False
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def facts(self, numbers: dict[str, Any], config: Config) -> dict[str, Any]:
        """A checkpoint's contents except vectors, vocabulary and `stages`, as of now; numbers: the optimizer's counters."""
        plain_config = configuration.plain(config)
        return {
            "version": __version__, "config": plain_config, "corpora": self.corpora, **self.own(), "optimizer": numbers,
        }  # fmt: skip

    def own(self) -> dict[str, Any]:
        """This state as JSON, without the vocabulary."""
        return {
            "progress": self.progress.state(),
            "patience": self.patience.state(),
            "validation_pending": self.validation_pending,
            "history": self.history,
        }

    def load_facts(self, own: Mapping[str, Any]) -> None:
        """Restore what `own` returned."""
        self.progress = Progress(**own["progress"])
        self.patience.load(own["patience"])
        self.validation_pending = bool(own["validation_pending"])
        self.history = own["history"]

    def save_best(self, path: Path, vector: Tensor, numbers: dict[str, Any], config: Config, flat: FlatModel) -> None:
        """Write a checkpoint of only the parameters, for translation, not for continuing; UserError if writing fails."""
        parts = {"parameters": flat.named(vector), **frozen_part(flat)}
        checkpoint.save(path, parts, self.facts(numbers, config), self.vocabulary)

    def begin(self, initial: Checkpoint | None, flat: FlatModel, validate: bool) -> Snapshot:
        """Return the snapshot of a new run; it has the parameters of `initial`, or else those of the model. Parameters that the
        model does not train are loaded into it.

        validate: whether to validate the parameters of `initial`. Raises UserError if it has another model.
        """
        parameters = cpu_copy(flat.parameters)
        if initial is not None:
            tensors = with_new_pieces(initial.best_parameters(), self.vocabulary, initial.vocabulary())
            if flat.frozen:
                flat.frozen.load(tensors, str(initial.path))
            else:
                flat.load(tensors, parameters, str(initial.path))
            self.validation_pending = validate
            updates = initial.facts["progress"]["updates"]
            digest = initial.facts["files"][f"{initial.best_name}.safetensors"]["sha256"]
            self.history = [
                *initial.facts.get("history", []),
                {"init": str(initial.path.resolve()), "updates": updates, "parameters": digest},
            ]
        return Snapshot({"parameters": parameters}, {"updates": 0, "torch": {}}, [], [], [])

    def begin_epoch(self, snapshot: Snapshot) -> None:
        """Let all workers continue with an epoch that has not begun: the batches of the present one have changed."""
        stopped = [position for stage in snapshot.stages for position in stage]
        epochs = max(position.epochs + (position.batches > 0) for position in stopped)
        snapshot.stages = [[Position(epochs) for _ in snapshot.stages[-1]]]
        self.progress.at(epochs, 0)

    def load(self, saved: Checkpoint, flat: FlatModel, smoothing: bool) -> Snapshot:
        """Restore this state from a checkpoint and return the snapshot. smoothing: whether the snapshot needs the running mean.

        Raises UserError if the checkpoint has another model or vocabulary, or only parameters.
        """
        where = str(saved.path)
        if saved.facts.get("stages") is None:
            raise UserError(f"{where}: holds parameters for translation only; continue from one of the run's checkpoints/")
        saved.expect(self.vocabulary)
        parameters = torch.empty_like(flat.parameters, device="cpu")
        flat.load(saved.tensors("parameters"), parameters, where)
        if flat.frozen:
            flat.frozen.load(saved.tensors("frozen"), where)
        vectors = {"parameters": parameters, **saved.tensors("optimizer")}
        if smoothing:
            vectors["smoothed"] = torch.empty_like(parameters)
            flat.load(saved.tensors(saved.best_name), vectors["smoothed"], where)
        for name, vector in vectors.items():
            if vector.shape != parameters.shape:
                file = f"{where}/optimizer.safetensors"
                raise UserError(f"{file}: {name} has {vector.numel()} elements instead of {parameters.numel()}")
        self.load_facts(saved.facts)
        stages = from_plain(saved.facts["stages"])
        random = saved.tensors("random")
        # Every rank has a generator, but ranks that train later (key `join`) have no position.
        ranks = range(max(len(stages[-1]), sum(name.startswith(_GENERATORS[0]) for name in random)))
        generators = [{name: random[_keyed(name, r)] for name in _GENERATORS if _keyed(name, r) in random} for r in ranks]
        files = [saved.tensors(f"worker-{rank}") if saved.has(f"worker-{rank}") else {} for rank in ranks]
        return Snapshot(vectors, saved.facts["optimizer"], [WorkerState.of(vectors) for vectors in files], generators, stages)


def frozen_part(flat: FlatModel) -> dict[str, dict[str, Tensor]]:
    """The file of a checkpoint with the parameters that the model does not train, if there are any."""
    return {"frozen": {name: cpu_copy(tensor) for name, tensor in flat.frozen.named().items()}} if flat.frozen else {}


def named_generators(random: Sequence[Vectors]) -> Vectors:
    """The states of all ranks' random generators, as a checkpoint names them."""
    return {_keyed(name, rank): state for rank, states in enumerate(random) for name, state in states.items()}


def _keyed(name: str, rank: int) -> str:
    return f"{name}-{rank}" if rank else name
