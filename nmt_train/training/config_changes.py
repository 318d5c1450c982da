"""What a configuration has in common with that of the run that it continues, or of the model that it begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nmt_train import config as configuration
from nmt_train.common.duration import Duration
from nmt_train.common.yaml_file import flatten
from nmt_train.config import Config, with_values
from nmt_train.config_text import shown
from nmt_train.corpus import CorpusConfig, CorpusPart
from nmt_train.corpus.store import Stores
from nmt_train.model import PRESETS, GuidedAlignmentConfig
from nmt_train.modes.auto import AUTO, SECTIONS, part_of_mode
from nmt_train.modes.resolve import optimizer_name

# Keys that may change when a run continues, without --force.
MAY_CHANGE = (
    "run", "init", "threads", "devices", "trace", "stop", "log", "checkpoint", "validation", "corpus.valid",
    "corpus.max_skipped", "corpus.max_ratio", "corpus.cache", "corpus.vocabulary.path", "mode",
    "optimizer.async_beta1", "optimizer.async_warmup", *SECTIONS, "transport", "recovery",
)  # fmt: skip
# Keys that decide which pairs are in which batch of an epoch; a position in the data has no meaning after a change of them.
_ORDER = (
    "seed", "corpus.train", "corpus.temperature", "corpus.epoch", "corpus.max_length", "corpus.window",
    "batch.tokens", "batch.sentences",
)  # fmt: skip
# Keys that cannot change when a run continues, even with --force: other values would have no effect, or would not match the
# run's parameters.
FIXED = (
    "corpus.vocabulary.size", "corpus.vocabulary.type", "corpus.vocabulary.character_coverage",
    "corpus.vocabulary.user_defined",
    "model.encoder_layers", "model.decoder_layers", "model.dim", "model.ffn_dim", "model.heads", "model.norm", "model.tied",
    "model.activation", "model.output_bias", "model.conventions", "model.lora_rank",
)  # fmt: skip


def saved_keys(old: dict[str, Any]) -> dict[str, Any]:
    """The leaves of a saved configuration; keys that the version that saved it did not have get their defaults."""
    saved = flatten(old)
    return {
        key.name: key.default for key in configuration.leaves().values() if not isinstance(key.default, (list, Duration))
    } | saved


def kept(config: Config, saved: Mapping[str, Any]) -> Config:
    """The configuration with the values that a saved one has for keys that it leaves open."""
    before = saved_keys(dict(saved))
    return with_values(config, {name: before[name] for name in config.undecided})


def inherited(config: Config, saved: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """The configuration with what its section `model` leaves open as in that of the model that init names.

    The guided head learns no more without alignments. Returns also a sentence with the values that are not defaults.
    """
    there, weight = saved_keys(dict(saved)), "model.guided_alignment.weight"
    found = {name: there[name] for name in config.undecided if name.startswith("model.")}
    if weight in found and found.get("model.guided_alignment.layer", config.model.guided_alignment.layer) is not None:
        found[weight] = (found[weight] or GuidedAlignmentConfig().weight) if config.corpus.aligned else 0.0
    config = with_values(config, found)
    usual = {name: key.default for name, key in configuration.leaves().items()}
    usual |= {"model.preset": None, **{f"model.{key}": value for key, value in PRESETS[config.model.preset].items()}}
    said = ", ".join(f"{name} {shown(value)}" for name, value in found.items() if value != usual[name])
    return config, [f"{said}: as in the model that init names"] * bool(said)


def contradictions(config: Config, saved: Mapping[str, Any]) -> list[str]:
    """List the keys of section `model`, with both values, that cannot differ from those of the model that init names."""
    there, here = saved_keys(dict(saved)), flatten(configuration.plain(config))
    its = [key for key in FIXED if key.startswith("model.") and key != "model.lora_rank"]  # factors are merged
    return [f"{key} {there[key]} (here {here[key]})" for key in its if key in here and there[key] != here[key]]


def differences(old: dict[str, Any], new: Config) -> list[str]:
    """List the keys, with both values, whose values differ between a saved configuration and `new`; omit MAY_CHANGE keys.

    The files of the training corpora may have other names, because `corpus_differences` compares their texts.
    """
    before = saved_keys(old)
    if new.mode == AUTO:
        new = with_values(new, part_of_mode(before))  # which a run keeps, unless it has begun with a single rank
    new = kept(new, old)
    after = flatten(configuration.plain(new))
    for values in (before, after):
        values["optimizer.name"] = optimizer_name(values["mode"], values["optimizer.name"])
        if values["optimizer.schedule"] == "cosine" and values["optimizer.cosine_until"] is None:
            spans = map(Duration.parse, values["stop.after"])
            values["optimizer.cosine_until"] = next((str(span) for span in spans if span.counts), None)
        values["corpus.train"] = [_without_files(entry) for entry in _entries(values["corpus.train"])]
    return [
        f"{name} was {shown(before.get(name))}, now {shown(after.get(name))}"
        for name in sorted(before.keys() | after.keys())
        if not _equal(before.get(name), after.get(name))
        and not any(name == key or name.startswith(key + ".") for key in MAY_CHANGE)
    ]


def corpus_differences(old: list[dict[str, Any]], new: Stores, corpus: CorpusConfig) -> list[str]:
    """List the training corpora whose content differs from that which a checkpoint identifies: text, weights or alignments.

    old: the `identity` of the checkpoint's corpora.
    """
    if len(old) != len(new.identity):
        return [f"corpus.train had {len(old)} corpora, now {len(new.identity)}"]
    return [
        f"{corpus.label(number)} had {before['pairs']:,} pairs, now {now['pairs']:,}"
        if before["pairs"] != now["pairs"]
        else f"{corpus.label(number)} has other text, sentence weights or alignments in its {now['pairs']:,} pairs"
        for number, (before, now) in enumerate(zip(old, new.identity, strict=True))
        if before != now
    ]


def change_order(changed: Sequence[str]) -> bool:
    """Whether these differences change which pairs are in which batch of an epoch."""
    return any(difference.startswith(tuple(f"{key}{end}" for key in _ORDER for end in " ,")) for difference in changed)


def _entries(train: Any) -> list[dict[str, Any]]:
    """The entries of `corpus.train`; a single corpus is one entry."""
    several = isinstance(train, list) and any(isinstance(entry, dict) for entry in train)
    return train if several else [{**dataclasses.asdict(CorpusPart(files=train)), "files": train}]


def _without_files(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in ("files", "name", "sentence_weights", "alignments")}


def _equal(before: Any, after: Any) -> bool:
    """Whether two values are the same, also as durations: 5000u is 5Ku."""
    if before == after or before is None or after is None:
        return bool(before == after)
    try:
        lengths = [Duration.parse(value) for value in (before, after)]
    except ValueError:
        return False
    return (lengths[0].amount, lengths[0].unit) == (lengths[1].amount, lengths[1].unit)
