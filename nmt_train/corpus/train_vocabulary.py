"""Trains a vocabulary on a sample of the corpora, or takes it from a cache."""

from __future__ import annotations

import concurrent.futures
import io
import os
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import sentencepiece

from nmt_train.common.errors import UserError
from nmt_train.common.streams import tell
from nmt_train.corpus import CorpusConfig, cache
from nmt_train.corpus.survey import SAMPLE_LINES, Survey
from nmt_train.corpus.text import LONGEST_LINE
from nmt_train.corpus.vocabulary import (
    BEGIN,
    END,
    PAD,
    SOURCE,
    SPACE,
    UNKNOWN,
    SeparateVocabularies,
    Vocabulary,
)

_RESERVED = "\u2585"  # SentencePiece leaves out lines with this character when it trains
_MODEL = "vocabulary.model"
# How words between spaces remain as they are: as many as there are, at most the size, and no normalization of their characters.
_AS_IT_IS: dict[str, Any] = {"hard_vocab_limit": False, "normalization_rule_name": "identity"}


def trained(config: CorpusConfig, folders: Sequence[Path], survey: Survey) -> Vocabulary:
    """The vocabulary that `train` makes of this text with these settings, from a cache in `folders` if it has been trained."""

    def write(entry: Path) -> None:
        (entry / _MODEL).write_bytes(model.model)
        (entry / cache.READY).write_text("{}")

    name = _name(config)
    known = cache.find(folders, name, _read)
    if known is not None:
        return known
    refuse_long(survey)
    model = train(config, survey)
    return cache.build(folders, name, _read, write)


def refuse_long(survey: Survey) -> None:
    """Raise UserError if training would surely leave out too many pairs, whatever the pieces will be."""
    survey.check_lengths(lambda lines, side: [len(line.split()) for line in lines], "words, each at least one piece")


def cached(config: CorpusConfig, folders: Sequence[Path]) -> Vocabulary | None:
    """The vocabulary that `train` has made of this text with these settings, if a cache in `folders` has it."""
    return cache.find(folders, _name(config), _read)


def _name(config: CorpusConfig) -> str:
    vocabulary = config.vocabulary
    settings: list[object] = [sentencepiece.__version__, vocabulary.size, vocabulary.type, vocabulary.character_coverage]
    settings.append(_whole(config))
    if vocabulary.user_defined:
        settings.append(vocabulary.user_defined)
    text = [cache.fingerprints(part, config.label(number)) for number, part in enumerate(config.parts)]
    return cache.name("vocabulary", [*settings, SAMPLE_LINES, text])


def _read(entry: Path) -> Vocabulary:
    with cache.hold(entry):
        return Vocabulary.read((entry / _MODEL).read_bytes(), str(entry / _MODEL))


def train(config: CorpusConfig, survey: Survey | None = None, fewer: bool = False) -> Vocabulary:
    """Train the vocabulary of `config.vocabulary` on both sides of the training corpus, or one on each.

    survey: of the training corpus, if there is one. fewer: if the text is too small for the requested size, make it smaller;
    otherwise, raise UserError.
    """
    texts, sizes = (survey or Survey(config)).lines, config.vocabulary.sizes
    made, wrong = list[Vocabulary](), list[str]()
    for side, (lines, size) in enumerate(zip(texts, sizes, strict=True)):
        try:
            made.append(_train(config, lines, size, side, fewer))
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise UserError("; ".join(dict.fromkeys(wrong)))
    source, *target = made
    return SeparateVocabularies.join(source, target[0], "the vocabularies just trained") if target else source


def _train(config: CorpusConfig, lines: Sequence[str], size: int, side: int, fewer: bool) -> Vocabulary:
    """Train a vocabulary of this size on these lines. side: whose vocabulary it is; SOURCE if it is that of both."""
    vocabulary = config.vocabulary
    output = io.BytesIO()
    whose = f" for the {('source', 'target')[side]}" if isinstance(vocabulary.size, list) else ""
    tell(f"nmt-train: training a vocabulary of {size:,} pieces{whose}{' on a sample' * fewer}")  # the log is not open yet
    if vocabulary.type == "word" and any(SPACE in line for line in lines):
        raise UserError(
            f"corpus.vocabulary.type: word would not leave the character {SPACE} of this corpus alone; give the text without"
            " it, or as it was before SentencePiece cut it, with that SentencePiece model as corpus.vocabulary.path"
        )
    whole = _whole(config) if side == SOURCE else [*(vocabulary.user_defined or ())]
    # The default is not given: the model would contain it.
    limit: dict[str, Any] = {"hard_vocab_limit": False} if fewer else {}
    training = partial(
        sentencepiece.SentencePieceTrainer.train,
        sentence_iterator=(line.replace(_RESERVED, " ") for line in lines),
        model_writer=output,
        vocab_size=size,
        model_type=vocabulary.type,
        character_coverage=vocabulary.character_coverage,
        pad_id=PAD,
        unk_id=UNKNOWN,
        bos_id=BEGIN,
        eos_id=END,
        user_defined_symbols=[SPACE + text for text in whole] if vocabulary.type == "word" else whole,
        num_threads=os.cpu_count() or 1,
        max_sentence_length=LONGEST_LINE,  # else it leaves out lines of more than 4,192 bytes
        minloglevel=2,
        **(limit | _AS_IT_IS if vocabulary.type == "word" else limit),
    )
    try:
        _in_thread(training)
    except RuntimeError as error:
        if "sentences_.empty()" in str(error):
            raise UserError("corpus.train: no pair has text on both sides; check the files") from None
        raise UserError(f"corpus.vocabulary.size: {_explain(str(error), size)}{whose}") from None
    return Vocabulary(output.getvalue(), "the vocabulary just trained")


def _whole(config: CorpusConfig) -> list[str]:
    """The tags and other texts that become one piece each."""
    tags = [part.tag for part in config.parts if part.tag]
    return list(dict.fromkeys([*tags, *(config.vocabulary.user_defined or ())]))


def _in_thread(work: Callable[[], object]) -> None:
    """Do work that may take minutes inside C++; in the main thread, Ctrl-C would have no effect until it ends."""
    done: concurrent.futures.Future[object] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    done.result()


def _explain(message: str, size: int) -> str:
    """Translate SentencePiece's error message into the terms of the configuration."""
    largest = re.search(r"value <= (\d+)", message)
    if largest:
        return f"{size} pieces are more than this corpus can fill; set it to {largest[1]} or less"
    if "required_chars" in message or "smaller than required" in message:
        return f"{size} pieces are fewer than the characters of this corpus need; choose a larger size"
    return f"{size} pieces could not be trained on this corpus; choose a smaller size ({message[-160:]})"
