"""What a run continues from, gathered for a checkpoint and put back; and models made from checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt_train import __version__, checkpoint
from nmt_train import config as configuration
from nmt_train.checkpoint import Checkpoint
from nmt_train.config import Config
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.errors import UserError
from nmt_train.flat import Flat
from nmt_train.model.transformer import Transformer
from nmt_train.progress import Progress
from nmt_train.schedule import Schedule
from nmt_train.stop import Patience


@dataclasses.dataclass
class State:
    """Everything that changes while training; `validation_pending` if a signal came before a validation was done."""

    flat: Flat
    schedule: Schedule
    progress: Progress
    patience: Patience
    validation_pending: bool = False

    def save(self, path: Path, config: Config, vocabulary: Vocabulary) -> None:
        """Write a checkpoint to `path`, whole or not at all; UserError if it cannot be written."""
        self.schedule.drain()
        optimizer = self.schedule.exchange.optimizer
        vectors, numbers = optimizer.state()
        tensors: dict[str, dict[str, Tensor]] = {
            "parameters": self.flat.named(self.flat.parameters),
            "optimizer": vectors,
            "random": {"cpu": torch.get_rng_state()},
        }
        if optimizer.smoothed is not None:
            tensors["smoothed"] = self.flat.named(optimizer.smoothed)
        if self.flat.parameters.is_cuda:
            tensors["random"]["cuda"] = torch.cuda.get_rng_state(self.flat.parameters.device)
        facts = {
            "version": __version__,
            "config": configuration.plain(config),
            "progress": self.progress.state(),
            "patience": self.patience.state(),
            "optimizer": numbers,
            "validation_pending": self.validation_pending,
        }
        checkpoint.save(path, tensors, facts, vocabulary)

    def load(self, saved: Checkpoint, vocabulary: Vocabulary) -> None:
        """Continue from a checkpoint; UserError if it is of another model, optimiser or vocabulary."""
        where = str(saved.path)
        if saved.facts["vocabulary"] != vocabulary.digest:
            raise UserError(f"{where}: was trained with another vocabulary than the run's vocabulary.model; restore that one")
        self.flat.load(saved.tensors("parameters"), self.flat.parameters, where)
        optimizer = self.schedule.exchange.optimizer
        optimizer.load(saved.tensors("optimizer"), saved.facts["optimizer"], f"{where}/optimizer.safetensors")
        if optimizer.smoothed is not None:
            kept = "smoothed" if saved.has("smoothed") else "parameters"
            self.flat.load(saved.tensors(kept), optimizer.smoothed, where)
        self.progress = Progress(**saved.facts["progress"])
        self.patience.load(saved.facts["patience"])
        self.validation_pending = bool(saved.facts["validation_pending"])
        random = saved.tensors("random")
        torch.set_rng_state(random["cpu"])
        if self.flat.parameters.is_cuda and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self.flat.parameters.device)


def load_model(paths: list[Path], device: torch.device) -> tuple[Transformer, Vocabulary, dict[str, Any]]:
    """The model of a checkpoint, or the mean of several, smoothed parameters preferred; with vocabulary and config.

    UserError if a checkpoint is damaged, or if they are of different models.
    """
    mean: dict[str, Tensor] = {}
    for count, path in enumerate(paths, 1):
        saved = checkpoint.load(path)
        if count == 1:
            first = saved
        elif saved.facts["vocabulary"] != first.facts["vocabulary"]:
            raise UserError(f"{path}: has another vocabulary than {paths[0]}; average checkpoints of one run")
        tensors = saved.tensors("smoothed" if saved.has("smoothed") else "parameters")
        if mean and {n: t.shape for n, t in mean.items()} != {n: t.shape for n, t in tensors.items()}:
            raise UserError(f"{path}: has other parameters than {paths[0]}; average checkpoints of one run")
        for name, tensor in tensors.items():
            mean[name] = tensor if count == 1 else mean[name].lerp_(tensor, 1 / count)
    vocabulary = first.vocabulary()
    if vocabulary.digest != first.facts["vocabulary"]:
        raise UserError(f"{first.path}: its vocabulary.model is another model's; use another checkpoint of the run")
    settings = configuration.validate(first.facts["config"], {})
    model = Transformer(settings.model, len(vocabulary))
    flat = Flat(model)
    flat.load(mean, flat.parameters, str(first.path))
    return model.to(device).eval(), vocabulary, first.facts
