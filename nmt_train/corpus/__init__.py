"""The corpus and batch sections of the configuration: text files, vocabulary, filters and batch size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, PlainSerializer, PlainValidator, Tag, model_validator
from pydantic.dataclasses import dataclass

from nmt_train.common.duration import Duration
from nmt_train.common.metric import METRICS
from nmt_train.common.section import STRICT, as_list, listed
from nmt_train.corpus.noise import Noise
from nmt_train.corpus.vocabulary_config import SPECIAL, VocabularyConfig

MAX_RATIO = 200.0  # bytes of text per byte of a compressed file: ordinary text has 5 to 10, purely repetitive text 1,000
# One entry per side, or one .tsv file with both sides; a side may be a list of files, which are read in order.
Files = list[str | list[str]] | str


def untagged(sources: Iterable[str], tags: Sequence[str]) -> Iterator[int]:
    """The numbers, from 1, of the sources without any of these tags; none if some corpus had no tag ("")."""
    if tags and "" not in tags:
        lacks = (source.strip() and not source.startswith(tuple(tags)) for source in sources)
        yield from (number for number, lacking in enumerate(lacks, 1) if lacking)


Weight = float | dict[int, float]  # one number, or numbers by the epoch, from 1, from which each applies


def _weight(value: Any) -> Weight | None:
    """The weight of a corpus. Raises ValueError if it is neither a positive number nor numbers by epochs."""
    try:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            if not 0 < float(value) < math.inf:
                raise ValueError(f"it should be greater than 0, not {value}")
            return float(value)
        weights = {int(first): float(weight) for first, weight in value.items()}
    except TypeError:
        raise ValueError(f"it should be a number, or numbers by epochs, as in {{1: 0.8, 4: 0.2}}, not {value!r}") from None
    if not weights or min(weights) < 1 or not all(0 <= weight < math.inf for weight in weights.values()):
        raise ValueError(f"it should be numbers of at least 0 by epochs of at least 1, as in {{1: 0.8, 4: 0.2}}, not {value}")
    return dict(sorted(weights.items()))


def _plain_weight(weight: Weight | None) -> Any:
    """The weight as a value of JSON and YAML, which `_weight` reads back."""
    return {str(first): its for first, its in weight.items()} if isinstance(weight, dict) else weight


def _check_tag(tag: str) -> None:
    if tag in SPECIAL or any(map(str.isspace, tag)):
        raise ValueError(f"tag {tag!r} cannot be one piece; write a word such as <2de>")


@dataclass(frozen=True, config=STRICT)
class CorpusPart:
    """One of several training corpora (an entry of `corpus.train`).

    files: in the form of `corpus.train` for a single corpus. name: for the log and errors. weight: its share of an epoch,
    relative to the other weights, for all epochs, or by the epoch from which it applies. until: used only in the first epochs,
    as 3e; None: always. tag: put before every source. sentence_weights: a file with one number per pair, or `column` for the
    third column of .tsv files. alignments: a file, or a list of files, with word alignments in Pharaoh format. noise: random
    changes.
    """

    files: Files
    name: str = ""
    weight: Annotated[Weight | None, PlainValidator(_weight), PlainSerializer(_plain_weight)] = None
    until: Duration | None = None
    tag: str = ""
    sentence_weights: str | None = None
    alignments: str | list[str] | None = None
    noise: Noise | None = None

    def weight_in(self, epoch: int) -> float | None:
        """The weight in an epoch, counted from 0."""
        if not isinstance(self.weight, dict):
            return self.weight
        return next((weight for first, weight in reversed(self.weight.items()) if first <= epoch + 1), 0.0)

    def used_in(self, epoch: int) -> bool:
        """Whether any pair is trained on in an epoch, counted from 0."""
        return (self.until is None or epoch < self.until.amount) and self.weight_in(epoch) != 0

    @property
    def changes(self) -> set[int]:
        """The epochs, counted from 0, in which another weight begins, or the corpus is no longer used."""
        later = {first - 1 for first in self.weight if first > 1} if isinstance(self.weight, dict) else set[int]()
        return later | ({int(self.until.amount)} if self.until is not None else set[int]())

    @model_validator(mode="after")
    def _check(self) -> CorpusPart:
        _check_tag(self.tag)
        if self.until is not None and self.until.unit != "e":
            raise ValueError(f"until {self.until} is not a number of epochs; write it as 3e")
        return self


@dataclass(frozen=True, config=STRICT)
class ValidationSet:
    """One of several validation sets (an entry of `corpus.valid`).

    name: for its metrics (as in `bleu@news`); the metrics of the first set have plain names. tag: put before every source, as
    in a training corpus. metrics: None means those of `validation.metrics`.
    """

    files: Files
    name: str = ""
    tag: str = ""
    metrics: Annotated[list[str], BeforeValidator(as_list), Field(min_length=1)] | None = None

    @property
    def label(self) -> str:
        """The name of the set in error messages."""
        return f"corpus.valid, {self.name}" if self.name else "corpus.valid"

    @model_validator(mode="after")
    def _check(self) -> ValidationSet:
        _check_tag(self.tag)
        if self.name and not all(letter.isalnum() or letter in "-_." for letter in self.name):
            raise ValueError(f"name {self.name!r} becomes part of file names; use letters, digits, -, _ and .")
        if self.metrics is not None and (wrong := [metric for metric in self.metrics if metric not in METRICS]):
            raise ValueError(f"metrics: it should be {listed(METRICS)}, not {wrong[0]!r}")
        return self


def _form(value: Any) -> str:
    """Whether `corpus.train` or `corpus.valid` gives files or a list of corpora."""
    several = isinstance(value, list) and any(isinstance(entry, (dict, CorpusPart, ValidationSet)) for entry in value)
    return "entry" if several else "files"


@dataclass(frozen=True, config=STRICT)
class CorpusConfig:
    """Parallel text: UTF-8, plain, .gz, .xz or .zst, one sentence per line; or .tsv with source and target in two columns."""

    train: Annotated[Annotated[Files, Tag("files")] | Annotated[list[CorpusPart], Tag("entry")], Discriminator(_form)] = Field(
        description="[source, target], each a file or a list of files; or [pairs.tsv]; relative to the working directory."
        " For several corpora: a list of {files: [source, target], name, weight, until: 3e, tag: '<2de>', sentence_weights,"
        " alignments, noise} (docs/corpora.md)"
    )
    valid: Annotated[Annotated[Files, Tag("files")] | Annotated[list[ValidationSet], Tag("entry")], Discriminator(_form)] = (
        Field(
            description="validation set: [source, target] or [pairs.tsv]. For several sets: a list of {files: [source, target],"
            " name, tag, metrics} (docs/corpora.md)"
        )
    )
    temperature: float | None = Field(
        default=None,
        ge=0.1,
        le=1000,
        description="of several corpora: each has a share of an epoch proportional to its size to the power 1/temperature;"
        " null: their weights apply; without weights, every pair occurs once",
    )
    epoch: int | None = Field(
        default=None,
        ge=1,
        le=10**12,
        description="the number of pairs that count as an epoch; null: as many as the corpora in use have [pairs]",
    )
    max_length: int = Field(
        default=100,
        ge=1,
        le=10**9,
        description="training leaves out pairs with a longer source or target, and logs their number [pieces]",
    )
    max_skipped: float = Field(
        default=0.2, ge=0, le=1, description="stop with an error if a larger fraction of pairs is left out (empty or over-long)"
    )
    max_ratio: float = Field(
        default=MAX_RATIO,
        ge=1,
        le=10**6,
        description="reject a compressed file if its text is more than this many times as long as the file",
    )
    cache: str | None = Field(
        default=None,
        description="folder for tokenized corpora and vocabularies; null: nmt_train in $XDG_CACHE_HOME or ~/.cache",
    )
    window: int = Field(
        default=100_000,
        ge=1,
        le=10**9,
        description="pairs are shuffled, then grouped by length within windows of this size [pairs]",
    )
    vocabulary: VocabularyConfig = Field(default_factory=VocabularyConfig)

    @property
    def parts(self) -> list[CorpusPart]:
        """The training corpora."""
        several = [part for part in self.train if isinstance(part, CorpusPart)]
        return several or [CorpusPart(files=self.train)]  # type: ignore[arg-type]

    @property
    def aligned(self) -> bool:
        """Whether a training corpus has word alignments."""
        return any(part.alignments is not None for part in self.parts)

    @property
    def stages(self) -> list[int]:
        """The epochs, from 0, in which a stage after the first begins: corpora end or have other weights; ascending."""
        return sorted(set[int]().union(*(part.changes for part in self.parts)))

    @property
    def validation_sets(self) -> list[ValidationSet]:
        """The validation sets. The first one's name is empty, because its metrics have plain names."""
        several = [part for part in self.valid if isinstance(part, ValidationSet)]
        if not several:
            return [ValidationSet(files=self.valid)]  # type: ignore[arg-type]
        return [replace(several[0], name=""), *several[1:]]

    def label(self, number: int) -> str:
        """The name of corpus `number` in error messages."""
        parts = self.parts
        return "corpus.train" if len(parts) == 1 else f"corpus.train, {parts[number].name or f'corpus {number + 1}'}"

    @model_validator(mode="after")
    def _check_parts(self) -> CorpusConfig:
        weighted = [part.weight is not None for part in self.parts]
        if any(weighted) and not all(weighted):
            raise ValueError("train needs a weight for every corpus, or for none")
        if any(weighted) and self.temperature is not None:
            raise ValueError("temperature would replace the weights of the corpora; remove it or them")
        called = [part.name for part in self.parts if part.name]
        if len(set(called)) < len(called):
            raise ValueError("train has two corpora with the same name; give each another")
        if all(part.until is not None for part in self.parts):
            raise ValueError("train has only corpora that end (until), and later epochs would be empty; remove one until")
        for epoch in (0, *self.stages):
            if not any(part.used_in(epoch) for part in self.parts):
                raise ValueError(f"train has no corpus in epoch {epoch + 1}; give one of them a weight there")
        names = [part.name for part in self.validation_sets]
        if "" in names[1:] or len(set(names)) < len(names):
            raise ValueError("valid needs a different name for every set after the first")
        return self


@dataclass(frozen=True, config=STRICT)
class BatchConfig:
    """Batch size (`sentences` if given, else `tokens`), and how an update combines batches."""

    tokens: int = Field(
        default=2048,
        ge=1,
        le=10**9,
        description="maximum of a batch's sentences times its longest target; auto: 2048 on a CPU; on a GPU, as many as fit, up"
        " to the size for which the preset's learning rate was chosen [target tokens]",
    )
    sentences: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="sentence pairs per batch (the last batch of a window has fewer); null: tokens applies",
    )
    accumulate: int = Field(
        default=1, ge=1, le=10**9, description="batches whose gradients a worker combines before it exchanges them [batches]"
    )
    reduction: Literal["mean", "sum"] = Field(
        default="mean",
        description="how an update combines the gradients of its batches, over steps, devices and machines: mean (per target"
        " token of all batches), or sum (of the batches' means per token; clipped by the norm of their mean; thesis 3.4)",
    )
