"""Exports a checkpoint, or the mean of several, as a folder for another program; it is written completely or not at all."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError

from nmt_train.common import atomic_file as durable
from nmt_train.common.errors import UserError
from nmt_train.corpus.vocabulary import BEGIN, LANGUAGE, PAD, Vocabulary
from nmt_train.load_model import load_model
from nmt_train.model.beam_search import SearchConfig
from nmt_train.model.transformer import Transformer
from nmt_train.model_formats import TARGETS, card, ctranslate, huggingface, marian_npz
from nmt_train.model_formats.card import Origin
from nmt_train.run.folder import refuse_existing


def export(checkpoints: list[Path], target: str, out: Path, quantize: str | None, search: SearchConfig) -> None:
    """Write the mean of `checkpoints` to the new folder `out`. target: one of TARGETS. quantize: only for ctranslate2.

    Raises UserError if a package is missing, if `out` exists or cannot be written, if a checkpoint is damaged, or if the target
    cannot represent the model.
    """
    if missing := [package for module, package in TARGETS[target].items() if not _installed(module)]:
        how = "pip install '.[export]' in the project's folder"
        raise UserError(f"--to {target}: {' and '.join(missing)} not installed; {how}")
    refuse_existing(out)
    model, vocabulary, facts = load_model(checkpoints, torch.device("cpu"))
    _refuse_not_finite(model, checkpoints)
    origin = Origin(facts, len(checkpoints), card.scores_of(checkpoints))

    def write(folder: Path) -> None:
        if target == "huggingface":
            huggingface.write(model, vocabulary, search, folder)
            text = card.huggingface(origin, model.config, huggingface.needs_transformers_5(model.config))
        elif target == "marian":
            marian_npz.write(model, vocabulary, search, folder)
            text = card.marian(origin, model.config)
        else:
            ctranslate.write(model, vocabulary, quantize, folder)
            pair = len(vocabulary.models) == 2
            languages = [vocabulary.piece(piece) for piece in (LANGUAGE, BEGIN)] if model.config.languages else []
            text = card.ctranslate2(origin, model.config, search, quantize, _special(vocabulary), pair, languages)
        (folder / "README.md").write_text(text, encoding="utf-8")

    _write_whole(out, write)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _refuse_not_finite(model: Transformer, checkpoints: list[Path]) -> None:
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise UserError(f"{checkpoints[-1]}: parameter {name} contains NaN or infinity; export an earlier checkpoint")


def _special(vocabulary: Vocabulary) -> tuple[str, str]:
    """The pieces that a translation must not contain, besides the unknown piece."""
    return vocabulary.piece(PAD), vocabulary.piece(BEGIN)


def _write_whole(out: Path, write: Callable[[Path], None]) -> None:
    beside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        beside.mkdir(parents=True)
        write(beside)
        mode = (beside / "README.md").stat().st_mode & 0o777
        for file in beside.iterdir():
            with suppress(OSError):  # a file system without permissions
                file.chmod(mode)  # safetensors ignores the umask and makes its files readable by the owner only
            durable.sync(file)
        durable.sync(beside)
        beside.rename(out)
        durable.sync(out.parent)
    except (OSError, SafetensorError) as error:  # the latter if the disk is full
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{out}: {reason}; name a folder that can be written, on a disk with enough space") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
