"""Imports models of other programs as checkpoints without optimizer state, for translation, `init` and export."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

from nmt_train import __version__
from nmt_train import config as configuration
from nmt_train.common.errors import UserError
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.model import SIZES, ModelConfig
from nmt_train.model_formats import marian, marian_npz
from nmt_train.run import checkpoint
from nmt_train.run.folder import refuse_existing
from nmt_train.run.progress import Progress


def import_model(source: Path, vocabularies: Sequence[Path], out: Path) -> str:
    """Write a model of another program as the new checkpoint `out`; return a message that describes it.

    source: the folder of a MarianMT model, or a .npz file of Marian with its `vocabularies`: one for both sides, or two.
    Raises UserError if the model cannot be read, or `out` exists or cannot be written.
    """
    refuse_existing(out)
    vocabulary: Vocabulary
    if source.suffix != ".npz" and not vocabularies:
        model, vocabulary, parameters = marian.read(source)
    else:
        if len(vocabularies) not in (1, 2):
            raise UserError(f"{source}: give its vocabulary (.spm), or those of source and target, with --vocab")
        model, vocabulary, parameters = marian_npz.read(source, vocabularies)
    imported = [f"imported from {source.resolve().name}"] * 2
    values = {
        "corpus": {"train": imported, "valid": imported, "vocabulary": {"size": vocabulary.size}},
        "model": dataclasses.asdict(model), "stop": {"after": "1u"},
    }  # fmt: skip
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in parameters.values())).hexdigest()
    facts = {
        "version": __version__,
        "config": configuration.plain(configuration.validate(values, {})),
        "progress": Progress().state(),
        "patience": {},
        "validation_pending": False,
        "optimizer": {"updates": 0, "torch": {}},
        "history": [{"imported": str(source.resolve()), "parameters": digest}],
    }
    checkpoint.save(out, {"parameters": parameters}, facts, vocabulary)
    sizes = f"{model.encoder_layers} + {model.decoder_layers} layers of width {model.dim}, {len(vocabulary):,} pieces"
    needed = f"init: {out} and model: {{{_needed(model)}}}"
    return f"{out}: {sizes}; fine-tune it with {needed}, translate with nmt-translate --model {out}"


def _needed(model: ModelConfig) -> str:
    """The keys of the section model that fine-tuning must give, since only sizes are taken from the model."""
    defaults = vars(ModelConfig())
    differ = {key: value for key, value in vars(model).items() if key not in SIZES and value != defaults[key]}
    return ", ".join(f"{key}: {str(value).lower()}" for key, value in differ.items() if not key.startswith("dropout"))
