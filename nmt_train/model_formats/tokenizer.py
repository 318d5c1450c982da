"""Converts a SentencePiece vocabulary to a tokenizer of Hugging Face's `tokenizers` that appends END to each text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from nmt_train.common.errors import UserError
from nmt_train.corpus.sentencepiece_model import CONTROL, UNUSED, USER_DEFINED, renumbered
from nmt_train.corpus.vocabulary import BEGIN, END, LANGUAGE, PAD, UNKNOWN, Vocabulary
from nmt_train.model_formats import write_json

_SPACE = "▁"  # represents a space in a piece
_UNIGRAM, _BPE = 1, 2  # SentencePiece's numbers for model types


def with_languages(pieces: int) -> list[int]:
    """Our ids in the order of a tokenizer with languages: padding has id 1, from which M2M100 numbers the positions."""
    return [UNKNOWN, PAD, *range(BEGIN, pieces)]


def write(vocabulary: Vocabulary, folder: Path, tokenizer_class: str, longest: int, languages: bool = False) -> None:
    """Write tokenizer.json and its configuration. longest: maximum pieces per sentence. Otherwise as `convert`."""
    names = [vocabulary.piece(special) for special in (PAD, UNKNOWN, BEGIN, END)]
    special = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), names, strict=True))
    convert(vocabulary, languages).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": tokenizer_class, "model_max_length": longest, "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", settings | special)
    write_json(folder / "special_tokens_map.json", special)


def convert(vocabulary: Vocabulary, languages: bool = False) -> Any:
    """Return a `tokenizers.Tokenizer` with the ids of `vocabulary`; encoding appends END.

    languages: encoding begins with LANGUAGE, and the ids are those of `with_languages`.

    Unlike SentencePiece, it encodes the name of a special piece in a text, such as <s>, as that special piece. Raises UserError
    if the SentencePiece model has a type that `tokenizers` does not support.
    """
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    order = with_languages(len(vocabulary)) if languages else [*range(len(vocabulary))]
    model.ParseFromString(renumbered(vocabulary.model, order))
    unknown_id = order.index(UNKNOWN)
    trained, normalizer = model.trainer_spec, model.normalizer_spec
    if trained.model_type not in (_UNIGRAM, _BPE) or trained.treat_whitespace_as_suffix:
        raise UserError(
            "the run's SentencePiece model has a type that Hugging Face's tokenizers do not support (only unigram and bpe,"
            " with spaces before words); export to ctranslate2, which uses SentencePiece itself"
        )
    lowest = min(piece.score for piece in model.pieces)  # of pieces that SentencePiece never makes from a text
    pieces = [(piece.piece, lowest if piece.type == UNUSED else piece.score) for piece in model.pieces]
    unmerged = {piece.piece for piece in model.pieces if piece.type in (CONTROL, UNUSED)}
    own = [piece.piece for piece in model.pieces if piece.type == USER_DEFINED]
    own.sort(key=len, reverse=True)  # SentencePiece takes the longest one that fits, a regular expression the first
    if trained.model_type == _UNIGRAM:
        tokenizer = Tokenizer(models.Unigram(pieces, unknown_id, trained.byte_fallback))
    else:
        ids = {piece: number for number, (piece, _) in enumerate(pieces)}
        unknown = vocabulary.piece(UNKNOWN)
        tokenizer = Tokenizer(
            models.BPE(
                ids,
                _merges([piece for piece in pieces if piece[0] not in unmerged]),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=trained.byte_fallback,
                ignore_merges=bool(own),  # no merge makes a piece of ours
            )
        )
    steps: list[Any] = [normalizers.Precompiled(normalizer.precompiled_charsmap)] if normalizer.precompiled_charsmap else []
    if normalizer.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if normalizer.add_dummy_prefix:  # Metaspace itself would not put a space before a text that begins with one
        steps.append(normalizers.Prepend(" "))
    tokenizer.normalizer = normalizers.Sequence(steps)
    spaces = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never", split=False)
    # Not added tokens, which would be cut out first: then the space that SentencePiece puts before the text would be missing.
    cuts = [pre_tokenizers.Split(Regex("|".join(map(re.escape, own))), "isolated")] if own else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([spaces, *cuts])
    around = [(vocabulary.piece(number), number) for number in ([LANGUAGE, END] if languages else [END])]
    template = " $A ".join(piece for piece, _ in around) if languages else f"$A {around[0][0]}"
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=around)
    backwards: list[Any] = [decoders.Replace(_SPACE, " ")]
    if trained.byte_fallback:
        backwards.append(decoders.ByteFallback())
    backwards.append(decoders.Fuse())
    if normalizer.add_dummy_prefix:
        backwards.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(backwards)
    special = [piece.piece for number, piece in enumerate(model.pieces) if number <= END or piece.type == CONTROL]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    return tokenizer


def _merges(pieces: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return the BPE merges, best first: every way to join two pieces into a third, ordered by the score of the third."""
    scores = dict(pieces)
    merges = [
        (-score, piece[:cut], piece[cut:])
        for piece, score in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(left, right) for _, left, right in sorted(merges, key=lambda merge: merge[0])]
