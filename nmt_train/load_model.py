"""Models made from checkpoints, for translation and validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from nmt_train.common.errors import UserError
from nmt_train.common.section import problem
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.model import ModelConfig
from nmt_train.model.ensemble import Ensemble
from nmt_train.model.transformer import Transformer
from nmt_train.optim.flat_model import FlatModel
from nmt_train.run.checkpoint import Checkpoint
from nmt_train.run.manifest import load_verified


def load_ensemble(models: list[list[Path]], device: torch.device) -> tuple[Transformer | Ensemble, Vocabulary, tuple[str, ...]]:
    """Load one model, or several as an ensemble, each from a checkpoint or as the mean of several; also `tags` of the first.

    Raises UserError as `load_model`, and if the models have different vocabularies.
    """
    found = [load_model(paths, device) for paths in models]
    model, vocabulary, facts = found[0]
    for paths, (_, other, _) in zip(models, found, strict=True):
        if other.digest != vocabulary.digest:
            raise UserError(f"{paths[-1]}: has another vocabulary than {models[0][-1]}; the models of an ensemble share one")
    return (model if len(found) == 1 else Ensemble([each for each, _, _ in found])), vocabulary, tags(facts)


def tags(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of the training corpora; "" is that of a corpus without one. facts: the content of checkpoint.json."""
    parts = facts.get("config", {}).get("corpus", {}).get("train", [])
    return tuple(dict.fromkeys(part.get("tag", "") if isinstance(part, dict) else "" for part in parts))


def load_model(paths: list[Path], device: torch.device) -> tuple[Transformer, Vocabulary, dict[str, Any]]:
    """Load the model of a checkpoint, or the mean of several; return it with its vocabulary and the last one's checkpoint.json.

    Uses smoothed parameters if a checkpoint has them. Raises UserError if a checkpoint is damaged, or if the checkpoints
    belong to different models.
    """
    mean: dict[str, Tensor] = {}
    for count, path in enumerate(paths, 1):
        saved = load_verified(path)
        if count == 1:
            first = saved
        elif saved.facts["vocabulary"] != first.facts["vocabulary"]:
            raise UserError(f"{path}: has a different vocabulary from {paths[0]}; average checkpoints of one run")
        tensors = saved.best_parameters()
        if mean and {n: t.shape for n, t in mean.items()} != {n: t.shape for n, t in tensors.items()}:
            raise UserError(f"{path}: has different parameters from {paths[0]}; average checkpoints of one run")
        for name, tensor in tensors.items():
            mean[name] = tensor if count == 1 else mean[name].lerp_(tensor, 1 / count)
    vocabulary = first.vocabulary()
    model = Transformer(_model_config(first), vocabulary.size)
    flat = FlatModel(model)
    flat.load(mean, flat.parameters, str(first.path))
    return model.to(device).eval(), vocabulary, saved.facts


def _model_config(saved: Checkpoint) -> ModelConfig:
    """Only the section `model`, because the names of other keys may have changed since the checkpoint was saved; without
    low-rank factors, which `best_parameters` merges.
    """
    try:
        return replace(ModelConfig(**saved.facts["config"]["model"]), lora_rank=None)
    except (KeyError, TypeError, ValueError) as error:
        text = problem(error).text if isinstance(error, ValidationError) else error
        raise UserError(f"{saved.path}: the configuration of its model: {text}; use the version that wrote it") from None
