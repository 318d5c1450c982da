"""Imports models of other programs as checkpoints without optimizer state, for translation, `init` and export."""

from __future__ import annotations

import hashlib
from pathlib import Path

from nmt_train import __version__
from nmt_train import config as configuration
from nmt_train.model_formats import marian
from nmt_train.run import checkpoint
from nmt_train.run.folder import refuse_existing
from nmt_train.run.progress import Progress


def import_model(folder: Path, out: Path) -> str:
    """Write the MarianMT model in `folder` as the new checkpoint `out`; return a message that describes it.

    Raises UserError if the model cannot be read, or `out` exists or cannot be written.
    """
    refuse_existing(out)
    model, vocabulary, parameters = marian.read(folder)
    imported = [f"imported from {folder.resolve().name}"] * 2
    values = {
        "corpus": {"train": imported, "valid": imported, "vocabulary": {"size": len(vocabulary)}},
        "model": vars(model), "stop": {"after": "1u"},
    }  # fmt: skip
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in parameters.values())).hexdigest()
    facts = {
        "version": __version__,
        "config": configuration.plain(configuration.validate(values, {})),
        "progress": Progress().state(),
        "patience": {},
        "validation_pending": False,
        "optimizer": {"updates": 0, "torch": {}},
        "history": [{"imported": str(folder.resolve()), "parameters": digest}],
    }
    checkpoint.save(out, {"parameters": parameters}, facts, vocabulary)
    sizes = f"{model.encoder_layers} + {model.decoder_layers} layers of width {model.dim}, {len(vocabulary):,} pieces"
    return f"{out}: {sizes}; fine-tune it with init: {out}, translate with nmt-translate --model {out}"
