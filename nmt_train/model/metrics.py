"""Metrics of a model on a test set: cross-entropy per target piece, perplexity, and BLEU and others of translations."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BeforeValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from nmt_train.common.duration import Duration
from nmt_train.common.errors import NotFinite, UserError
from nmt_train.common.metric import COMMAND, METRICS, named
from nmt_train.common.section import STRICT, as_list, one_of
from nmt_train.corpus import MAX_RATIO, CorpusConfig, Files, ValidationSet
from nmt_train.corpus.batch import Batch, assemble, fitting
from nmt_train.corpus.store import Stores
from nmt_train.corpus.swapped import swapped
from nmt_train.corpus.text import read_pairs, refuse_empty
from nmt_train.corpus.vocabulary import TARGET, Vocabulary
from nmt_train.model.beam_search import SearchConfig
from nmt_train.model.bleu import AUTO, DEFAULT, TOKENIZERS, choose_tokenizer, scorer
from nmt_train.model.external_score import CommandFailed, Stopped, external_score
from nmt_train.model.transformer import Transformer
from nmt_train.model.translator import NO_PROBABILITIES, Translator, best_text

# Settings of the validation that do not change the value of a metric that needs translations.
_HOW = ("every", "metrics", "command", "command_limit", "batch_tokens")
_LONGEST = 4000  # pieces; the memory of attention grows with the square of the length


@dataclass(frozen=True, config=STRICT)
class ValidationConfig:
    """When and how the validation set is evaluated."""

    every: Duration | None = Field(
        default=Duration.parse("1000u"), description="interval between two validations, as 500u, 1e, 300Kt or 10m; null: never"
    )
    metrics: Annotated[list[Annotated[str, one_of(METRICS)]], BeforeValidator(as_list)] = Field(
        default=["cross-entropy", "bleu"],
        min_length=1,
        description="any of cross-entropy (nats per target piece, END included), perplexity, and, in percent, bleu, chrf,"
        " chrf++, ter (translation edit rate) and exact-match (the share of translations that equal their references)",
    )
    bleu_tokenizer: Annotated[str, one_of(TOKENIZERS)] = Field(
        default=AUTO,
        description="sacreBLEU's tokenizer for BLEU; auto: zh or char for references in a script without spaces, else 13a",
    )
    command: str | None = Field(
        default=None,
        description="a shell command whose last line of output is a score, higher is better (metric `command`); {source},"
        " {translations} and {reference} stand for files with one sentence per line",
    )
    command_limit: Duration = Field(
        default=Duration.parse("10m"), description="stop validation.command after this time; the score is then missing"
    )
    beam: int = Field(default=5, ge=1, le=1000, description="beam size")
    normalization: float = Field(default=1.0, ge=0, le=10, description="log-probabilities are divided by length to this power")
    batch_tokens: int = Field(
        default=2048,
        ge=1,
        le=10**9,
        description="maximum of a batch's sentences times its longest source or target; less above 256 pieces [pieces]",
    )

    @model_validator(mode="after")
    def _check(self) -> ValidationConfig:
        if self.command_limit.counts:
            raise ValueError(f"command_limit {self.command_limit} is not a time; write 10m")
        return self

    def of_set(self, part: ValidationSet) -> list[str]:
        """The metrics to measure on a validation set."""
        own = self.metrics if part.metrics is None else part.metrics
        return [*own, *([COMMAND] if self.command else [])]

    def test(self, metric: str) -> dict[str, Any]:
        """The settings that a value of the metric depends on; values are comparable only if these are equal."""
        if metric != COMMAND and not METRICS[metric].translated:
            return {}
        own = {name: value for name, value in vars(self).items() if name not in _HOW}
        return {**own, "command": self.command} if metric == COMMAND else own

    def names(self, parts: Sequence[ValidationSet]) -> list[str]:
        """The names of all metrics on all validation sets."""
        return [named(metric, part.name) for part in parts for metric in self.of_set(part)]


class Interrupted(Exception):
    """Validation stopped on request before it was complete."""


@plain_dataclass
class Scores:
    """The value of each metric, the sacreBLEU signatures, and the translations if a metric needed them.

    failures: for each metric that could not be measured, the reason.
    """

    values: dict[str, float] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)
    translations: list[str] | None = None
    failures: dict[str, str] = field(default_factory=dict)


class TestSet:
    """A parallel test set in memory; it keeps all pairs unfiltered, including empty lines."""

    __test__ = False  # pytest must not collect this class because of its name

    def __init__(self, files: Files, key: str, vocabulary: Vocabulary, ratio: float = MAX_RATIO, tag: str = "") -> None:
        """`key`: the configuration key of `files`, for error messages; `ratio` as for `read_lines`; tag: before every source.

        Raises UserError if the files cannot be read, are empty, or have a line of more than _LONGEST pieces, or if the
        vocabulary does not know the tag.
        """
        if not vocabulary.knows(tag):
            raise UserError(f"{key}: tag {tag} is unknown to the vocabulary of this run; choose one that it knows")
        pairs = list(read_pairs(files, key, ratio))
        self.sources, self.references = [source for source, _ in pairs], [target for _, target in pairs]
        refuse_empty(key, any(self.sources), any(self.references))
        before = vocabulary.encode([tag])[0]
        self.source = [np.array(before + ids if ids else ids, dtype=np.int64) for ids in vocabulary.encode(self.sources)]
        self.target = [np.array(ids, dtype=np.int64) for ids in vocabulary.encode(self.references, TARGET)]
        self._vocabulary = vocabulary
        for number, ids in enumerate(zip(self.source, self.target, strict=True), 1):
            if max(map(len, ids)) > _LONGEST:
                raise UserError(f"{key}, line {number}: longer than {_LONGEST:,} pieces; split or remove the line")

    @cached_property
    def checksum(self) -> str:
        """Identifies the text of the set, with the pieces before its sources."""
        parts = (self.references, self.sources, [ids.tolist() for ids in self.source])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def measure(
        self, model: Transformer, config: ValidationConfig, asked_to_stop: Callable[[], bool] = lambda: False
    ) -> Scores:
        """Compute all of `config.metrics` for the current parameters of the model.

        Raises Interrupted soon after `asked_to_stop` returns true, and NotFinite if the model gives no probabilities.
        """
        scores = Scores()
        if {"cross-entropy", "perplexity"} & set(config.metrics):
            entropy = self._cross_entropy(model, config.batch_tokens, asked_to_stop)
            measured = {"cross-entropy": entropy, "perplexity": math.exp(min(entropy, 700.0))}
            scores.values |= {metric: value for metric, value in measured.items() if metric in config.metrics}
        translated = sorted(metric for metric in set(config.metrics) if METRICS[metric].translated)
        if translated or config.command:
            scores.translations = self.translate(model, config, asked_to_stop)
            for metric in translated:
                judge = scorer(metric, self.tokenizer(config))
                scores.values[metric] = judge.corpus_score(scores.translations, [self.references]).score
                scores.signatures[metric] = str(judge.get_signature())
        scores.values = {metric: scores.values[metric] for metric in config.metrics}
        if config.command:
            self._ask_command(scores, config, asked_to_stop)
        return scores

    def tokenizer(self, config: ValidationConfig) -> str:
        """The tokenizer of BLEU on this set."""
        return choose_tokenizer(config.bleu_tokenizer, self.references)

    def _ask_command(self, scores: Scores, config: ValidationConfig, asked_to_stop: Callable[[], bool]) -> None:
        texts = {"source": self.sources, "translations": scores.translations or [], "reference": self.references}
        try:
            scores.values[COMMAND] = external_score(str(config.command), texts, config.command_limit.amount, asked_to_stop)
        except (CommandFailed, OSError) as error:  # OSError: no space for temporary files, for example
            scores.failures[COMMAND] = str(error)
        except Stopped:
            raise Interrupted from None

    @torch.inference_mode()
    def score(self, model: Transformer, batch_tokens: int) -> list[float]:
        """Return log p of each target, END included, in the order of the pairs; raises NotFinite as `measure`."""
        found = [0.0] * len(self.source)
        for group, batch in self._batches(model, batch_tokens, lambda: False):
            for pair, value in zip(group, model.log_probabilities(batch).tolist(), strict=True):
                found[pair] = value
        if not all(map(math.isfinite, found)):
            raise NotFinite(NO_PROBABILITIES)
        return found

    @torch.inference_mode()
    def _cross_entropy(self, model: Transformer, batch_tokens: int, asked_to_stop: Callable[[], bool]) -> float:
        total, tokens = 0.0, 0
        for _, batch in self._batches(model, batch_tokens, asked_to_stop):
            total += float(model.cross_entropy(batch))
            tokens += batch.target_tokens
        if not math.isfinite(total):
            raise NotFinite(NO_PROBABILITIES)
        return total / tokens

    def _batches(
        self, model: Transformer, batch_tokens: int, asked_to_stop: Callable[[], bool]
    ) -> Iterator[tuple[list[int], Batch]]:
        """Yield batches on the device of the model, with the numbers of their pairs, longest first, in evaluation mode."""
        device = next(model.parameters()).device
        lengths = [(len(target), len(source)) for target, source in zip(self.target, self.source, strict=True)]
        order = sorted(range(len(lengths)), key=lambda i: (max(lengths[i]), lengths[i]))  # the longest pair is last
        was_training = model.training
        model.eval()
        try:
            while order:
                if asked_to_stop():
                    raise Interrupted
                size = fitting(1 + max(lengths[order[-1]]), batch_tokens)
                group, order = order[-size:], order[:-size]
                yield group, assemble([self.source[i] for i in group], [self.target[i] for i in group]).to(device)
        finally:
            model.train(was_training)

    def translate(
        self, model: Transformer, config: ValidationConfig, asked_to_stop: Callable[[], bool] = lambda: False
    ) -> list[str]:
        """Translate all sources; raises as `measure`."""
        search = SearchConfig(beam=config.beam, normalization=config.normalization)
        most = _LONGEST + 1  # with END, so that no source is cut
        translator = Translator(model, self._vocabulary, search, config.batch_tokens, most)
        order = sorted(range(len(self.source)), key=lambda i: -len(self.source[i]))
        found: dict[int, str] = {}

        def check() -> None:
            if asked_to_stop():
                raise Interrupted

        for start in range(0, len(order), 500):
            part = order[start : start + 500]
            texts = best_text(self._vocabulary, translator.translate([self.source[i] for i in part], check))
            found |= dict(zip(part, texts, strict=True))
        return [found[i] for i in range(len(self.source))]


class TestSets:
    """The validation sets of a run. Metrics of the first one have plain names, those of others names such as `bleu@news`."""

    __test__ = False

    def __init__(self, corpus: CorpusConfig, vocabulary: Vocabulary) -> None:
        """Raises UserError as `TestSet` does."""
        self._parts = corpus.validation_sets
        self._sets = [TestSet(part.files, part.label, vocabulary, corpus.max_ratio, part.tag) for part in self._parts]

    def swapped(self, corpus: CorpusConfig, stores: Stores) -> list[str]:
        """The labels of the sets whose source and target seem exchanged, compared with every corpus that has their tag."""
        found = []
        for part, test_set in zip(self._parts, self._sets, strict=True):
            alike = [
                tokens
                for trained, tokens in zip(corpus.parts, stores.tokens, strict=True)
                if not part.tag or trained.tag == part.tag
            ]
            if alike and all(swapped(tokens, (test_set.source, test_set.target)) for tokens in alike):
                found.append(part.label)
        return found

    def tests(self, config: ValidationConfig) -> dict[str, str]:
        """For each metric on each set, what identifies the text and the settings that it is measured with."""
        found = {}
        for part, test_set in zip(self._parts, self._sets, strict=True):
            for metric in config.of_set(part):
                facts = json.dumps([test_set.checksum, config.test(metric)])
                found[named(metric, part.name)] = hashlib.sha256(facts.encode()).hexdigest()[:16]
        return found

    def measure(
        self, model: Transformer, config: ValidationConfig, asked_to_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Scores]:
        """Return the scores on each set, by its name; arguments and errors as for `TestSet.measure`."""
        found = {}
        for part, test_set in zip(self._parts, self._sets, strict=True):
            its = config if part.metrics is None else replace(config, metrics=part.metrics)
            found[part.name] = test_set.measure(model, its, asked_to_stop)
        return found

    def tokenizers(self, config: ValidationConfig) -> list[str]:
        """A sentence for each set whose script decides the tokenizer of BLEU. UserError if a tokenizer is not installed."""
        sentences = []
        for part, test_set in zip(self._parts, self._sets, strict=True):
            if "bleu" not in config.of_set(part):
                continue
            tokenizer = test_set.tokenizer(config)
            if tokenizer != DEFAULT:
                scorer("bleu", tokenizer)
            if tokenizer not in (DEFAULT, config.bleu_tokenizer):
                sentences.append(f"BLEU on {part.label}: tokenizer {tokenizer}, for its script (validation.bleu_tokenizer)")
        return sentences
