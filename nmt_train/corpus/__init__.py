"""The corpus and batch sections of the configuration: text files, vocabulary, filters and batch size."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from nmt_train.common.section import STRICT

MAX_RATIO = 200.0  # gzip shrinks ordinary text to 1/5 or 1/10, but purely repetitive text to 1/1000
# One entry per side, or one .tsv file with both sides; a side may be a list of files, which are read in order.
Files = list[str | list[str]] | str


@dataclass(frozen=True, config=STRICT)
class VocabularyConfig:
    """The SentencePiece model shared by both languages; a run without one trains it."""

    path: str | None = Field(
        default=None,
        description="an existing SentencePiece model to use instead of training one; relative to the working directory",
    )
    size: int = Field(default=8000, ge=16, le=10**6, description="pieces in the vocabulary, the four special ones included")
    type: Literal["unigram", "bpe"] = Field(default="unigram", description="how pieces are chosen: unigram or bpe")
    character_coverage: float = Field(default=0.9999, gt=0.9, le=1, description="share of characters that get pieces")
    sample_lines: int = Field(
        default=2_000_000, ge=101, le=10**9, description="at most so many lines, drawn at random, train it"
    )
    sampling: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="subword regularisation (unigram only): power of a segmentation's probability; 0: off",
    )
    sampling_candidates: int = Field(default=16, ge=2, le=1000, description="segmentations to draw from when sampling")

    @model_validator(mode="after")
    def _check_sampling(self) -> VocabularyConfig:
        if self.sampling and self.type != "unigram":
            raise ValueError(f"sampling needs type unigram, not {self.type}")
        return self


@dataclass(frozen=True, config=STRICT)
class CorpusConfig:
    """Parallel text: UTF-8, plain or .gz, one sentence per line; or .tsv with source and target in its first two columns."""

    train: Files = Field(
        description="[source, target], each a file or a list of files; or [pairs.tsv]; relative to the working directory"
    )
    valid: Files = Field(description="the same for the validation set; relative to the working directory")
    max_length: int = Field(
        default=100, ge=1, le=10**9, description="pairs with a longer side are not trained on, but counted [pieces]"
    )
    max_skipped: float = Field(
        default=0.2, ge=0, le=1, description="refuse to train when a larger share of pairs is left out (empty or over-long)"
    )
    max_ratio: float = Field(
        default=MAX_RATIO, ge=1, le=10**6, description="refuse a .gz file whose text is more than so many times as long as it"
    )
    window: int = Field(
        default=100_000, ge=1, le=10**9, description="pairs shuffled, then grouped by length, together [sentences]"
    )
    vocabulary: VocabularyConfig = Field(default_factory=VocabularyConfig)


@dataclass(frozen=True, config=STRICT)
class BatchConfig:
    """How large a batch is: by `sentences` if given, else by `tokens`."""

    tokens: int = Field(
        default=2048, ge=1, le=10**9, description="a batch's sentences times its longest target [target tokens]"
    )
    sentences: int | None = Field(
        default=None, ge=1, le=10**9, description="exactly so many sentences per batch instead of tokens"
    )
    accumulate: int = Field(default=1, ge=1, le=10**9, description="batches whose gradients a worker joins for one update")
    reduction: Literal["mean", "sum"] = Field(
        default="mean",
        description="how gradients of batches are joined for one update, over steps, devices and machines: mean (per target"
        " token of all of them), or sum (of each batch's mean per token, clipped as their mean is; thesis 3.4)",
    )
