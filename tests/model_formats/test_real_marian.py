"""The real Marian, where it is installed (scripts/marian.py): random models score in it as here, in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import marian
import numpy as np
import pytest
import torch
from models import random_model

from nmt_train import cli
from nmt_train.cli import import_model
from nmt_train.corpus.batch import assemble
from nmt_train.corpus.text import read_lines
from nmt_train.corpus.vocabulary import TARGET, Vocabulary
from nmt_train.load_model import load_model
from nmt_train.model.beam_search import SearchConfig
from nmt_train.model.transformer import Transformer
from nmt_train.model_formats import marian_npz

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not marian.INSTALLED, reason="pymarian is not installed")]

SIZES = ("--enc-depth", 1, "--dec-depth", 2, "--dim-emb", 32, "--transformer-dim-ffn", 48, "--transformer-heads", 4)
PRE_NORM = ("--transformer-preprocess", "n", "--transformer-postprocess", "da", "--transformer-postprocess-top", "n")


def scores(model: Transformer, vocabulary: Vocabulary, demo: Path) -> list[float]:
    sources, targets = ([*read_lines(demo / f"test.{language}")] for language in ("en", "de"))
    batch = assemble(
        [np.array(ids) for ids in vocabulary.encode(sources)], [np.array(ids) for ids in vocabulary.encode(targets, TARGET)]
    )
    with torch.inference_mode():
        return model.log_probabilities(batch).tolist()


@pytest.mark.parametrize(
    "options",
    [
        ("--tied-embeddings-all",),
        ("--tied-embeddings-all", *PRE_NORM, "--transformer-ffn-activation", "relu"),
        ("--tied-embeddings", "--output-omit-bias"),
        (),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocabularies", [1, 2])
def test_a_model_that_marian_has_trained_scores_the_same_here(
    demo: Path, tmp_path: Path, options: tuple[Any, ...], vocabularies: int
) -> None:
    if vocabularies == 2 and "--tied-embeddings-all" in options:
        pytest.skip("both sides share their embeddings")
    paths = [tmp_path / f"{number}.spm" for number in range(vocabularies)]
    marian.marian(
        "train", "--type", "transformer", "-m", tmp_path / "model.npz", "-t", demo / "train.en", demo / "train.de",
        "-v", paths[0], paths[-1], "--dim-vocabs", 120, 100 if vocabularies == 2 else 120, *SIZES, *options,
        "--after", "20u", "--learn-rate", 0.01, "--mini-batch", 50, "-w", 256, "--quiet",
    )  # fmt: skip
    arguments = [tmp_path / "model.npz", tmp_path / "ours", "--vocab", *paths]
    assert cli.run(import_model.command, [str(argument) for argument in arguments]) == 0
    model, vocabulary, _ = load_model([tmp_path / "ours"], torch.device("cpu"))
    wanted = marian.score(tmp_path / "model.npz", paths, demo / "test.en", demo / "test.de")
    assert scores(model, vocabulary, demo) == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("tied", ["all", "target-output", "none"])
@pytest.mark.parametrize("more", [{}, {"activation": "swish", "output_bias": True}], ids=str)
def test_a_model_trained_here_scores_the_same_in_marian(
    demo: Path, tmp_path: Path, vocabulary: Vocabulary, tied: str, more: dict[str, Any]
) -> None:
    model = random_model(len(vocabulary), "post", tied, conventions="marian", **more)
    marian_npz.write(model, vocabulary, SearchConfig(), tmp_path)
    files = tmp_path / "model.npz", [tmp_path / "vocab.spm"]
    assert scores(model, vocabulary, demo) == pytest.approx(marian.score(*files, demo / "test.en", demo / "test.de"), abs=1e-3)
