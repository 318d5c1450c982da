"""Values that a configuration leaves open (`config.OPEN`): decided at the start by the device and the corpus, then saved.

The number of training pairs decides the size of the model; that and the tokens of an update, how fast it learns.
Precision and batch size are tried out on every rank; all ranks get the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nmt_train import config as configuration
from nmt_train import device
from nmt_train.common.errors import UserError
from nmt_train.common.yaml_file import flatten
from nmt_train.config import Config, with_values
from nmt_train.corpus.store import Stores
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.modes.resolve import resolve
from nmt_train.open_keys import OPEN
from nmt_train.replicas.collective_all_reduce import SUMS
from nmt_train.replicas.reducers import REDUCERS
from nmt_train.run.checkpoint import Checkpoint
from nmt_train.strategy.plan import ReplicasPlan
from nmt_train.training.config_changes import inherited, kept
from nmt_train.training.device_trials import Tried, on_cpu, try_out
from nmt_train.transport import Transport
from nmt_train.transport.collective import broadcast, gather

_PRESETS = ((50_000, "tiny"), (500_000, "small"))  # for corpora with fewer pairs; base for larger ones
_FASTER = 1.05  # what bf16 must gain


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


Say = Callable[[str], None]


def lead(
    config: Config, transport: Transport, own: torch.device, vocabulary: Vocabulary, stores: Stores,
    saved: Checkpoint | None, initial: Checkpoint | None, say: Say,
) -> tuple[Config, list[str]]:  # fmt: skip
    """Decide all that does not depend on the mode as rank 0, and tell the other ranks, which call `follow`.

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
    config, of_device = with_device(config, [Tried(faster=0.0, tokens=on_cpu(config))], ", as on a CPU")
    config, of_mode = with_mode(config, stores, nodes)
    return config, [*said, *of_device, *of_mode]


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
        keeps = [name for name in keeps if values[name] != "ring"]  # as nearly always
        return config, [f"{', '.join(f'{name} {values[name]}' for name in keeps)}: as in the run so far"] * bool(keeps)
    if initial is not None:
        return inherited(config, initial.facts["config"])
    if "model.preset" not in config.undecided:
        return config, []
    pairs = sum(int(its["pairs"]) for its in stores.identity)
    preset = next((preset for most, preset in _PRESETS if pairs < most), "small" if small else "base")
    return with_values(config, {"model.preset": preset}), [f"model.preset {preset}, for {pairs:,} pairs{' on a CPU' * small}"]


def with_device(config: Config, tried: Sequence[Tried], why: str = "") -> tuple[Config, list[str]]:
    """The configuration with a precision and a batch size that suit all ranks, and sentences about them.

    why: the end of the sentence about the batch size.     Raises UserError if no batch fits one of them.
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
        said.append(f"batch.tokens {tokens:,}{why}")
    return with_values(config, found), said


def lead_mode(config: Config, transport: Transport, stores: Stores, gpus: bool) -> tuple[Config, list[str]]:
    """Decide what depends on the mode, as rank 0, when the mode is known; the others call `follow_mode`.

    gpus: whether every rank has a GPU of its own.
    """
    now, said = with_mode(config, stores, transport.nodes, gpus)
    _tell(transport, config, now)
    return now, said


def follow_mode(config: Config, transport: Transport) -> Config:
    return with_values(config, broadcast(transport, {}, "found")["found"])


def with_mode(config: Config, stores: Stores, nodes: Sequence[int], gpus: bool = False) -> tuple[Config, list[str]]:
    """The configuration with a learning rate, a warm-up and an algorithm that adds up vectors, and sentences about them."""
    config, of_rate = _with_rate(config, stores, nodes)
    config, of_algorithm = _with_algorithm(config, nodes, gpus)
    return config, [*of_rate, *of_algorithm]


def _with_algorithm(config: Config, nodes: Sequence[int], gpus: bool) -> tuple[Config, list[str]]:
    """NCCL where vectors are added up as they are, between GPUs of one machine; everywhere else a ring."""
    if "replicas.algorithm" not in config.undecided:
        return config, []
    family = resolve(config, tuple(nodes)).family
    adds = isinstance(family, ReplicasPlan) and REDUCERS[family.reducer].codecs == "summable" and family.codec in SUMS["torch"]
    if not (adds and gpus and len(nodes) > len(set(nodes)) == 1):
        return with_values(config, {"replicas.algorithm": "ring"}), []
    said = "replicas.algorithm torch (NCCL), because every rank has a GPU of its own on this machine"
    return with_values(config, {"replicas.algorithm": "torch"}), [said]


def _with_rate(config: Config, stores: Stores, nodes: Sequence[int]) -> tuple[Config, list[str]]:
    """The configuration with a learning rate and a warm-up for its preset and the target tokens of an update.

    The rate grows with the square root of the tokens up to those of the recipe (measured with preset tiny, docs/comparison.md),
    and with their fourth root from there (fairseq after Ott et al. 2018: twice the rate for 16 times the tokens). A run that
    begins with another model has a fifth of it, so that it does not forget what that model knows (but not if it trains only
    factors of low rank, which begin at zero), and a short warm-up.
    """
    if not {"optimizer.learning_rate", "optimizer.warmup"} & set(config.undecided):
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
    return try_out(config, own, vocabulary, stores, wanted, RECIPES[config.model.preset].tokens)
