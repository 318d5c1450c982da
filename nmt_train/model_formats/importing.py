"""Imports models of other programs as checkpoints without optimizer state, for translation, `init` and export."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from nmt_train import __version__
from nmt_train import config as configuration
from nmt_train.common.errors import UserError
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.model import ModelConfig
from nmt_train.model_formats import huggingface_folder, m2m100, marian, marian_npz
from nmt_train.run import checkpoint
from nmt_train.run.folder import refuse_existing
from nmt_train.run.progress import Progress

Pair = tuple[str | None, str | None]


def import_model(source: Path, vocabularies: Sequence[Path], out: Path, pair: Pair = (None, None)) -> str:
    """Write a model of another program as the new checkpoint `out`; return a message that describes it.

    source: the folder of a MarianMT, M2M100 or NLLB model, or a .npz file of Marian with its `vocabularies`: one for both
    sides, or two. pair: the languages of source and target, for a model that has several of both.
    Raises UserError if the model cannot be read, or `out` exists or cannot be written.
    """
    refuse_existing(out)
    model, vocabulary, parameters = _read(source, vocabularies, pair)
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
    return f"{out}: {sizes}; fine-tune it with init: {out}, translate with nmt-translate --model {out}"


def _read(source: Path, vocabularies: Sequence[Path], pair: Pair) -> tuple[ModelConfig, Vocabulary, dict[str, Tensor]]:
    npz = source.suffix == ".npz" or bool(vocabularies)
    found = {} if npz else huggingface_folder.json_object(source / huggingface_folder.CONFIG)
    kind = found.get("model_type")
    if kind == "m2m_100":
        return m2m100.read(source, found, pair)
    if kind == "nllb-moe":
        raise UserError(f"{source}: is a mixture of experts, which cannot be read; give a dense model of NLLB")
    if not npz and kind != "marian":
        raise UserError(
            f"{source / huggingface_folder.CONFIG}: model_type is {kind!r}; only marian, and m2m_100 (M2M100, NLLB) can be read"
        )
    if any(pair):
        raise UserError(f"--from and --to: {source} is no M2M100 or NLLB model, whose languages they choose; leave them out")
    if not npz:
        return marian.read(source, found)
    if len(vocabularies) not in (1, 2):
        raise UserError(f"{source}: give its vocabulary (.spm), or those of source and target, with --vocab")
    return marian_npz.read(source, vocabularies)
