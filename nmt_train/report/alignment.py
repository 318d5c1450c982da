"""A translation as a figure: how much each of its words attends to each word of the source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from nmt_train import device
from nmt_train.common.errors import UserError
from nmt_train.corpus.text import clean
from nmt_train.load_model import load_model
from nmt_train.model.beam_search import SearchConfig
from nmt_train.model.translator import Translator
from nmt_train.report.convergence import shown_name
from nmt_train.report.figure import BLUE, INK, new_figure, save_figure
from nmt_train.run.folder import newest

_CELL, _LETTER = 0.32, 0.085  # inches: of a row or column, and of a letter


def plot(run: Path, sentence: str, output: Path) -> list[Path]:
    """Translate a sentence with the newest checkpoint of a run, and draw the alignment; write `output` (PNG, SVG or PDF).

    Raises UserError if the sentence is empty, or if the model has no guided attention head.
    """
    sentence = clean(os.fsencode(sentence).decode(errors="replace"))
    if not sentence.split():
        raise UserError("command line: the sentence is empty; give a line to translate")
    model, vocabulary, _ = load_model(newest(run, 1), device.prepare_one("cpu", 0))
    if not model.guided:
        raise UserError(f"{run}: has no guided attention head; train with model.guided_alignment.layer (docs/corpora.md)")
    ((text, best),) = next(Translator(model, vocabulary, SearchConfig(), align=True).stream([sentence]))
    assert best.alignment is not None
    save_figure(figure(sentence, text, best.alignment), output)
    return [output]


def figure(source: str, target: str, soft: np.ndarray) -> Any:
    """The figure of a soft alignment (target words + 1, source words + 1) of two lines."""
    from matplotlib.colors import LinearSegmentedColormap

    columns, rows = ([*map(shown_name, line.split()), "(end)"] for line in (source, target))
    above, left = (_LETTER * max(map(len, words)) for words in (columns, rows))
    width, height = left + _CELL * len(columns) + 0.5, above + _CELL * len(rows) + 0.8
    drawn, axes = new_figure(max(4.0, width), max(2.5, height), "What each word attends to")
    axes.imshow(soft, cmap=LinearSegmentedColormap.from_list("attention", ["white", BLUE]), vmin=0, vmax=1)
    axes.set_xticks(range(len(columns)), columns, rotation=90, color=INK)
    axes.set_yticks(range(len(rows)), rows, color=INK)
    axes.xaxis.tick_top()
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    return drawn
