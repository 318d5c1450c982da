"""Values that a configuration leaves open (`config.OPEN`): decided at the start by the device and the corpus, then saved.

The number of training pairs decides the size of the model; that and the tokens of an update, how fast it learns.
Precision and batch size are tried out on every rank; all ranks get the same.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from nmt_train import config as configuration
from nmt_train import device
from nmt_train.common.errors import UserError
from nmt_train.common.yaml_file import flatten
from nmt_train.config import OPEN, Config, with_values
from nmt_train.corpus.batch import Batch
from nmt_train.corpus.batches import Batches
from nmt_train.corpus.store import Stores
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.model.transformer import Transformer
from nmt_train.modes.resolve import resolve
from nmt_train.optim.flat_model import FlatModel
from nmt_train.run.checkpoint import Checkpoint
from nmt_train.training.config_changes import inherited, kept
from nmt_train.transport import Transport
from nmt_train.transport.collective import broadcast, gather

_PRESETS = ((50_000, "tiny"), (500_000, "small"))  # for corpora with fewer pairs; base for larger ones
_CPU_TOKENS = 2048
_VECTORS = 8  # of the size of the parameters that training may keep on a GPU: optimizer, running mean, residuals, buffers
_MARGIN = 0.85  # share of a GPU's memory that the largest batch may need
_FASTER = 1.05  # what bf16 must gain
_TRIAL, _TURNS = 512, 5  # target tokens of a batch with which a CPU tries both precisions, and how often


class Recipe(NamedTuple):
    """How fast a preset learns. tokens: of an update, for which the rate was chosen. warmup: in updates."""

    rate: float
    warmup: int
    tokens: int
    source: str


RECIPES = {
    "tiny": Recipe(0.006, 400, 2048, "measured on Multi30k, docs/comparison.md"),
    "small": Recipe(5e-4, 4000, 4096, "fairseq's recipe for IWSLT"),
    "base": Recipe(7e-4, 4000, 25_000, "Vaswani et al. 2017, 5.3"),
    "big": Recipe(5e-4, 4000, 25_000, "fairseq's recipe after Ott et al. 2018"),
}
_RATES = {"adagrad": 0.02, "adadelta": 1.0}  # of optimizers to which the rates of Adam do not apply
_ADAM = ("adam", "adamw")
_TUNING, _TUNING_WARMUP = 0.2, 200  # share of the rate, and updates, where training begins with another model


@dataclasses.dataclass(frozen=True)
class Tried:
    """What a rank has found out. faster: how many times as fast a step is in bf16, infinite if only bf16 fits, 0 if there is no
    bf16. tokens: the largest batch that fits, by precision; 0 if none does."""

    faster: float
    tokens: dict[str, int]


Say = Callable[[str], None]


def lead(
    config: Config, transport: Transport, own: torch.device, vocabulary: Vocabulary, stores: Stores,
    saved: Checkpoint | None, initial: Checkpoint | None, say: Say,
) -> tuple[Config, list[str]]:  # fmt: skip
    """Decide all but the learning rate as rank 0, and tell the other ranks, which call `follow`.

    saved: the newest checkpoint of the run, whose values it keeps. initial: the one whose model a new run begins with. say:
    called with what is going on. Returns the configuration, and sentences for the log.
    """
    before = config
    config, said = _of_model(config, stores, saved, initial, small=own.type == "cpu")
    _tell(transport, before, config)
    if tries := _to_try(config):
        if "precision" in tries and device.has_bf16(own):
            say("trying both precisions")
        tried = gather(transport, dataclasses.asdict(_try(config, own, vocabulary, stores, tries)))
        config, sentences = with_device(config, [Tried(**its) for its in tried])
        said += sentences
    _tell(transport, before, config)
    return config, said


def follow(config: Config, transport: Transport, own: torch.device, vocabulary: Vocabulary, stores: Stores) -> Config:
    """Take part in what `lead` does, as another rank."""
    first = with_values(config, broadcast(transport, {}, "found")["found"])
    if tries := _to_try(first):
        gather(transport, dataclasses.asdict(_try(first, own, vocabulary, stores, tries)))
    return with_values(config, broadcast(transport, {}, "found")["found"])


def without_device(
    config: Config, stores: Stores, nodes: Sequence[int], saved: Checkpoint | None = None, initial: Checkpoint | None = None
) -> tuple[Config, list[str]]:
    """Decide everything as for a CPU without bf16, for simulations, whose results must not depend on this machine."""
    config, said = _of_model(config, stores, saved, initial, small=True)
    config, of_device = with_device(config, [Tried(faster=0.0, tokens=_on_cpu(config))])
    config, of_rate = with_rate(config, stores, nodes)
    return config, [*said, *of_device, *of_rate]


def _on_cpu(config: Config) -> dict[str, int]:
    return dict.fromkeys(("fp32", "bf16"), max(_CPU_TOKENS, config.corpus.max_length + 1))


def _tell(transport: Transport, before: Config, now: Config) -> None:
    """Send the other ranks the values of all keys that were open before, and no longer are."""
    values = flatten(configuration.plain(now))
    broadcast(transport, {"found": {name: values[name] for name in before.undecided if name not in now.undecided}})


def _of_model(
    config: Config, stores: Stores, saved: Checkpoint | None, initial: Checkpoint | None, small: bool
) -> tuple[Config, list[str]]:
    """Decide everything if there is a checkpoint to continue from, else the model.

    small: at most preset small, because larger ones train for weeks on a CPU.
    """
    if saved is not None:
        keeps = [name for name in OPEN if name in config.undecided]
        config = kept(config, saved.facts["config"])
        values = flatten(configuration.plain(config))
        return config, [f"{', '.join(f'{name} {values[name]}' for name in keeps)}: the run began so"] * bool(keeps)
    if initial is not None:
        return inherited(config, initial.facts["config"])
    if "model.preset" not in config.undecided:
        return config, []
    pairs = sum(int(its["pairs"]) for its in stores.identity)
    preset = next((preset for most, preset in _PRESETS if pairs < most), "small" if small else "base")
    return with_values(config, {"model.preset": preset}), [f"model.preset {preset}, for {pairs:,} pairs{' on a CPU' * small}"]


def with_device(config: Config, tried: Sequence[Tried]) -> tuple[Config, list[str]]:
    """The configuration with a precision and a batch size that suit all ranks, and sentences about them.

    Raises UserError if no batch fits one of them.
    """
    found, said = dict[str, Any](), list[str]()
    faster = min(its.faster for its in tried)
    if "precision" in config.undecided:
        found["precision"] = "bf16" if faster >= _FASTER else "fp32"
        how = f"a step in bf16 is {faster:.1f} times as fast"
        if not 0 < faster < math.inf:
            how = "fp32 needs too much memory" if faster else "bf16 is not known to be faster here"
        said.append(f"precision {found['precision']}, because {how}")
    if "batch.tokens" in config.undecided:
        tokens = min(its.tokens[found.get("precision", config.precision)] for its in tried)
        if not tokens:
            raise UserError(
                f"batch.tokens: not even a batch of {config.corpus.max_length + 1} target tokens fits a device; choose a"
                " smaller model.preset, or lower corpus.max_length"
            )
        found["batch.tokens"] = tokens
        said.append(f"batch.tokens {tokens:,}")
    return with_values(config, found), said


def lead_rate(config: Config, transport: Transport, stores: Stores) -> tuple[Config, list[str]]:
    """Decide the learning rate and the warm-up as rank 0, when the mode is known; the others call `follow_rate`."""
    now, said = with_rate(config, stores, transport.nodes)
    _tell(transport, config, now)
    return now, said


def follow_rate(config: Config, transport: Transport) -> Config:
    return with_values(config, broadcast(transport, {}, "found")["found"])


def with_rate(config: Config, stores: Stores, nodes: Sequence[int]) -> tuple[Config, list[str]]:
    """The configuration with a learning rate and a warm-up for its preset and the target tokens of an update.

    The rate grows with the square root of the tokens up to those of the recipe (measured with preset tiny, docs/comparison.md),
    and with their fourth root from there (fairseq after Ott et al. 2018: twice the rate for 16 times the tokens). A run that
    begins with another model has a fifth of it, so that it does not forget what that model knows (but not if it trains only
    factors of low rank, which begin at zero), and a short warm-up.
    """
    if not config.undecided:
        return config, []
    recipe, plan = RECIPES[config.model.preset], resolve(config, tuple(nodes))
    name = plan.optimizer.name or "adam"
    tokens = _tokens(config, stores) * config.batch.accumulate
    tokens *= plan.workers if plan.synchronous and not plan.local_steps else 1
    share = tokens / recipe.tokens
    rate, warmup = recipe.rate * share ** (0.5 if share < 1 else 0.25), recipe.warmup
    why = f"for preset {config.model.preset} and {tokens:,.0f} tokens per update ({recipe.source})"
    if name not in _ADAM:
        rate, why = _RATES.get(name, config.optimizer.learning_rate), f"for {name}"
    if config.init is not None:
        warmup = min(warmup, _TUNING_WARMUP)
        if config.model.lora_rank is None:
            rate, why = rate * _TUNING, f"{why}; less for fine-tuning (init)"
    found = {"optimizer.learning_rate": float(f"{rate:.2g}"), "optimizer.warmup": warmup}
    found = {key: value for key, value in found.items() if key in config.undecided}
    listed = ", ".join(f"{key} {value:g}" for key, value in found.items())
    return with_values(config, found), [f"{listed}, {why}"]


def _tokens(config: Config, stores: Stores) -> float:
    """Target tokens of a batch, about."""
    if config.batch.sentences is None:
        return config.batch.tokens
    lengths = np.concatenate([target for _, target in stores.lengths()])
    return config.batch.sentences * float(np.minimum(lengths, config.corpus.max_length).mean() + 1)


def _to_try(config: Config) -> set[str]:
    return {"precision", "batch.tokens"} & set(config.undecided)


def _try(config: Config, own: torch.device, vocabulary: Vocabulary, stores: Stores, wanted: set[str]) -> Tried:
    """Try what is wanted on this device, with a model of the configured size."""
    try:
        return _tried(config, own, vocabulary, stores, wanted)
    finally:
        device.release()


def _tried(config: Config, own: torch.device, vocabulary: Vocabulary, stores: Stores, wanted: set[str]) -> Tried:
    gpu, bf16 = own.type == "cuda", device.has_bf16(own)
    fits, compares = gpu and "batch.tokens" in wanted, bf16 and "precision" in wanted
    faster, tokens, least = 0.0, _on_cpu(config), config.corpus.max_length + 1
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
        most = RECIPES[config.model.preset].tokens
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
