"""Which precision and which batch size suit a device: found by trying them out before training begins."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from nmt_train import device
from nmt_train.config import Config
from nmt_train.corpus.batch import Batch
from nmt_train.corpus.batches import Batches
from nmt_train.corpus.store import Stores
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.model.transformer import Transformer
from nmt_train.optim.flat_model import FlatModel

_CPU_TOKENS = 2048
_VECTORS = 8  # of the size of the parameters that training may keep on a GPU: optimizer, running mean, residuals, buffers
_MARGIN = 0.85  # share of a GPU's memory that the largest batch may need
_TRIAL, _TURNS = 512, 5  # target tokens of a batch with which a CPU tries both precisions, and how often


@dataclasses.dataclass(frozen=True)
class Tried:
    """What a rank has found out. faster: how many times as fast a step is in bf16, infinite if only bf16 fits, 0 if there is no
    bf16. tokens: the largest batch that fits, by precision; 0 if none does."""

    faster: float
    tokens: dict[str, int]


def on_cpu(config: Config) -> dict[str, int]:
    """The batch size of a CPU, by precision [target tokens]."""
    return dict.fromkeys(("fp32", "bf16"), max(_CPU_TOKENS, config.corpus.max_length + 1))


def try_out(config: Config, own: torch.device, vocabulary: Vocabulary, stores: Stores, wanted: set[str], most: int) -> Tried:
    """Try what is wanted (`precision`, `batch.tokens`) on this device, with a model of the configured size.

    most: largest batch to try [target tokens].
    """
    try:
        return _tried(config, own, vocabulary, stores, wanted, most)
    finally:
        device.release()


def _tried(config: Config, own: torch.device, vocabulary: Vocabulary, stores: Stores, wanted: set[str], most: int) -> Tried:
    gpu, bf16 = own.type == "cuda", device.has_bf16(own)
    fits, compares = gpu and "batch.tokens" in wanted, bf16 and "precision" in wanted
    faster, tokens, least = 0.0, on_cpu(config), config.corpus.max_length + 1
    if not (fits or compares):
        return Tried(faster, tokens)

    def model(precision: str) -> FlatModel:
        return FlatModel(Transformer(config.model, vocabulary.size).to(own).train(), precision)

    def step(flat: FlatModel, batch: Batch) -> None:
        flat.backward(flat.loss(batch.to(own)))

    def largest(tokens: int) -> Batch:
        batch = dataclasses.replace(config.batch, tokens=tokens)
        return Batches(stores, config.corpus, batch, vocabulary, config.seed).largest()

    def fitting(flat: FlatModel) -> int:
        memory = device.memory(own, config.devices, 1) * _MARGIN - 4 * _VECTORS * flat.parameters.numel()
        return fit(lambda tokens: device.peak(own, partial(step, flat, largest(tokens))), least, most, memory)

    if fits:
        for precision in ("fp32", "bf16") if compares else (config.precision,):
            tokens[precision] = fitting(model(precision))
    if compares:
        size = max(least, *tokens.values()) if fits else config.batch.tokens
        batch = largest(size if gpu else max(least, min(size, _TRIAL)))
        faster = _faster([partial(step, model(precision), batch) for precision in ("fp32", "bf16")], own)
    return Tried(faster, tokens)


def fit(needs: Callable[[int], float], least: int, most: int, memory: float) -> int:
    """The largest batch, of `least` to `most` target tokens, that needs no more than `memory` bytes; 0 if none does.

    needs: the bytes that a step takes with the largest batch of this many tokens; infinite if there are too few. Halves the
    size until a step fits, then takes the size that fits on the line through what two sizes need.
    """
    tokens = most = max(least, most)
    while (taken := needs(tokens)) > memory:
        if tokens == least:
            return 0
        tokens = max(least, tokens // 2)
    if tokens in (least, most):
        return tokens
    smaller = max(least, tokens // 2)
    slope = (taken - needs(smaller)) / max(1, tokens - smaller)
    return min(2 * tokens, int(tokens + (memory - taken) / slope)) if slope > 0 else tokens


def _faster(steps: Sequence[Callable[[], None]], own: torch.device) -> float:
    """How many times as fast the second kind of step is as the first: infinite if there is not enough memory for the first."""
    settle = device.settle(own) or (lambda: None)
    best = [math.inf, math.inf]
    try:
        for turn in range(_TURNS + 1):
            for kind, step in enumerate(steps):  # in turn, because other work may use the same device
                start = time.perf_counter()
                step()
                settle()
                if turn:  # the first step prepares kernels and memory
                    best[kind] = min(best[kind], time.perf_counter() - start)
    except torch.OutOfMemoryError:
        return math.inf
    return best[0] / best[1]
