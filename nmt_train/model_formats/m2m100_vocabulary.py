"""Vocabularies of M2M100 and NLLB: one SentencePiece model, ids in fairseq's order, and a piece for each language.

M2M100 has a table of ids, and its languages follow in a fixed order. In NLLB, ids are those of the SentencePiece model, shifted
by the pieces with which fairseq begins, and the languages are added tokens of its tokenizer. Ours is a SentencePiece model with
all of these pieces: BEGIN is the target language, LANGUAGE the source language.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import sentencepiece

from nmt_train.common.errors import UserError
from nmt_train.corpus.sentencepiece_model import CONTROL, NORMAL, UNUSED, entry, renumbered
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.model_formats.huggingface_folder import content, json_object

MODEL, TABLE = "sentencepiece.bpe.model", "vocab.json"
_TOKENIZER, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_PAD, _END, _UNKNOWN = "<pad>", "</s>", "<unk>"
_SPECIAL = ("<s>", _PAD, _END, _UNKNOWN)  # the first ids of fairseq
_SPARE = 10_000  # embeddings without a piece that a model may have
_OF_NLLB = re.compile("[a-z]{3}_[A-Z][a-z]{3}")  # a language and its script
# The languages by the key language_codes of the tokenizer, in the order of their ids.
_OF_M2M100 = {
    "m2m100": "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy"
    " id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk"
    " sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu",
    "wmt21": "en ha is ja cs ru zh de",
}


def read(folder: Path, rows: int, pair: tuple[str | None, str | None]) -> tuple[Vocabulary, list[int]]:
    """Return our vocabulary, and their id for each of our ids.

    rows: the number of their embeddings. pair: the languages of source and target. The table of M2M100 lacks some pieces of its
    SentencePiece model (fairseq, issue 3463), which are unknown there; here, they are split into known ones. Raises UserError
    if a file is missing or damaged, or if there is no such language.
    """
    path = folder / MODEL
    model = content(path, "copy it from the model that this one was fine-tuned from")
    processor = _processor(model, path)
    table, languages = _m2m100(folder) if (folder / TABLE).exists() else _nllb(folder, processor)
    names = {number: name for name, number in table.items()}
    if len(names) < len(table) or not 0 <= min(names) <= max(names) < rows <= len(names) + _SPARE:
        raise UserError(
            f"{folder}: the ids of its pieces do not fit vocab_size of config.json, {rows:,}; give the files of one model"
        )
    source, target = (languages[_checked(*each, languages, folder)] for each in zip(("--from", "--to"), pair, strict=True))
    if source == target:
        raise UserError(f"--from and --to: both are {pair[0]}; choose two languages")
    names = {number: f"<unused{number}>" for number in range(rows)} | names
    first = dict.fromkeys(table[name] for name in (_PAD, _UNKNOWN, target, _END, source))
    order = [*first, *(number for number in range(rows) if number not in first)]
    theirs = {processor.id_to_piece(number): number for number in range(len(processor))}
    without_text = {*_SPECIAL, "<mask>", *languages.values(), *({*names.values()} - table.keys())} - {_UNKNOWN}
    pieces: list[int | bytes] = []
    for name in map(names.__getitem__, order):
        number = theirs.pop(name, None)
        if name in without_text:
            pieces.append(entry(name, CONTROL))
        else:
            pieces.append(entry(name, NORMAL if len(name) == 1 else UNUSED) if number is None else number)
    # A character without an id is unknown. Longer pieces without an id are needed for merges.
    unused = [number for name, number in theirs.items() if len(name) > 1]
    return Vocabulary(renumbered(model, pieces, (_PAD, _UNKNOWN, target, _END), unused), str(path)), order


def _checked(option: str, language: str | None, languages: Mapping[str, str], folder: Path) -> str:
    if language in languages:
        return str(language)
    some = ", ".join([*languages][:3])
    if language is None:
        raise UserError(f"{folder}: has {len(languages)} languages ({some}, ...); choose two of them with --from and --to")
    near = get_close_matches(language, languages, n=3, cutoff=0.4)
    advice = f"did you mean {' or '.join(near)}?" if near else f"it has {some} and others"
    raise UserError(f"{option}: the model has no language {language}; {advice}")


def _m2m100(folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    """The ids of all pieces, and the piece of each language."""
    table = json_object(folder / TABLE)
    if not {*_SPECIAL} <= table.keys() or sorted(map(str, table.values())) != sorted(map(str, range(len(table)))):
        raise UserError(
            f"{folder / TABLE}: not the table of an M2M100 model: it needs {', '.join(_SPECIAL)}, and all ids from 0 on;"
            " download it again"
        )
    codes = str(_settings(folder).get("language_codes", "m2m100"))
    if codes not in _OF_M2M100:
        raise UserError(f"{folder / _SETTINGS}: language_codes is {codes!r}; only {' and '.join(_OF_M2M100)} can be read")
    languages = {code: f"__{code}__" for code in _OF_M2M100[codes].split()}
    return table | {piece: len(table) + place for place, piece in enumerate(languages.values())}, languages


def _nllb(folder: Path, processor: sentencepiece.SentencePieceProcessor) -> tuple[dict[str, int], dict[str, str]]:
    """The ids of all pieces, and the piece of each language."""
    if _settings(folder).get("legacy_behaviour"):
        raise UserError(
            f"{folder / _SETTINGS}: legacy_behaviour is true: its sources end with their language; only models whose sources"
            " begin with it can be read"
        )
    if [processor.unk_id(), processor.bos_id(), processor.eos_id()] != [0, 1, 2]:
        raise UserError(f"{folder / MODEL}: does not begin with <unk>, <s> and </s>; it is not of an NLLB model")
    shifted = {processor.id_to_piece(number): number + 1 for number in range(len(_SPECIAL) - 1, len(processor))}
    added = _added(folder)
    languages = {piece: piece for piece in added if _OF_NLLB.fullmatch(piece)}
    if not languages:
        raise UserError(
            f"{folder}: has neither {TABLE} (as M2M100 has), nor {_TOKENIZER} or {_SETTINGS} with the languages of NLLB, such"
            " as eng_Latn; copy them from the model that this one was fine-tuned from"
        )
    return added | {piece: number for number, piece in enumerate(_SPECIAL)} | shifted, languages


def _added(folder: Path) -> dict[str, int]:
    """The ids of the tokens that the tokenizer adds to the SentencePiece model."""
    path = folder / (_TOKENIZER if (folder / _TOKENIZER).exists() else _SETTINGS)
    try:
        if path.name == _TOKENIZER:
            return {str(token["content"]): int(token["id"]) for token in json_object(path)["added_tokens"]}
        tokens = _settings(folder).get("added_tokens_decoder", {})
        return {str(token["content"]): int(number) for number, token in tokens.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{path}: not of a tokenizer of Hugging Face; download it again") from None


def _settings(folder: Path) -> dict[str, Any]:
    return json_object(folder / _SETTINGS) if (folder / _SETTINGS).exists() else {}


def _processor(model: bytes, path: Path) -> sentencepiece.SentencePieceProcessor:
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, ValueError):
        raise UserError(f"{path}: not a SentencePiece model; download it again, or run git lfs pull") from None
    if processor.id_to_piece(processor.unk_id()) != _UNKNOWN:
        raise UserError(f"{path}: its unknown piece is not {_UNKNOWN}; it is not of an M2M100 or NLLB model")
    return processor
