"""The part of the page about the model, memory, batches, the length of training and disks."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nmt_train import device
from nmt_train.check.memory import Needs, of_batch, of_vectors
from nmt_train.check.page import Page, amount, size
from nmt_train.common.errors import UserError
from nmt_train.common.paths import expanded
from nmt_train.common.section import as_list
from nmt_train.config import Config
from nmt_train.corpus import cache
from nmt_train.corpus.batches import Batches
from nmt_train.corpus.mixture import Mixture
from nmt_train.corpus.store import Stores, is_built
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.modes.resolve import resolve
from nmt_train.simulation.timing import count, shapes_of
from nmt_train.training import defaults
from nmt_train.training.prepared_run import Beginning
from nmt_train.training.setup import check_steps
from nmt_train.transport.local import LocalTransport

_PROGRAM = 0.5e9  # bytes of the program itself
_MUCH = 0.9  # share of the memory from which the page warns


@dataclass(frozen=True)
class Text:
    """stores: random pairs of the corpora. vocabulary: the run's, or one that stands for it. pieces: how many the run's has."""

    stores: Stores
    vocabulary: Vocabulary
    pieces: int | list[int]


def describe(page: Page, config: Config, nodes: Sequence[int], own: torch.device, text: Text, begin: Beginning) -> None:
    """Print what training needs of this machine.

    Reasons why training cannot begin or continue: not enough memory for the vectors alone, not enough disk space, or too few
    steps.
    """
    config = _decided(page, config, nodes, own, text, begin)
    plan, shapes = resolve(config, tuple(nodes)), shapes_of(config, text.pieces)
    page.line("model", f"{amount(count(shapes))} parameters, {config.precision}", device.slow_precision(own, config.precision))
    page.line("mode", f"{plan.mode} on {len(nodes)} x {own.type}")
    # The share left out was checked before, with the error of a sample; an epoch is as long as the sample.
    loose = dataclasses.replace(config.corpus, max_skipped=1.0, epoch=None)
    batches = Batches(text.stores, loose, config.batch, text.vocabulary, config.seed)
    needs = of_vectors(config, nodes, shapes)
    with page.going_on():
        _memory(page, config, nodes, own, needs, of_batch(config, text.pieces, batches.largest()))
    sizes = batches.target_tokens()
    mean = sum(sizes) / len(sizes)
    page.line("batch", f"about {mean:,.0f} words in {len(batches) / len(sizes):,.0f} pairs on average")
    words = _words(page, config, text.stores)
    update = mean * plan.workers * config.batch.accumulate
    for span in (span for span in config.stop.after if span.counts):
        length = span.amount * {"e": words, "u": update, "t": 1.0}[span.unit]
        page.line("length", f"stop.after {span} is about {amount(length)} words, {length / words:,.1f} epochs")
    with page.going_on():
        check_steps(config, plan, lambda: [round(mean)] * max(1, round(words / mean)), plan.workers)
    with page.going_on():
        _disks(page, config, needs, 4.0 * count(shapes), text, begin)


def _decided(page: Page, config: Config, nodes: Sequence[int], own: torch.device, text: Text, begin: Beginning) -> Config:
    """The configuration with values for the keys that it leaves open, as the start of training decides them.

    On a CPU, both precisions are not tried out, because that takes long.
    """
    if own.type == "cuda":
        config, said = defaults.lead(
            config, LocalTransport(), own, text.vocabulary, text.stores, begin.saved, begin.initial, lambda what: None
        )
        config, of_mode = defaults.with_mode(config, text.stores, nodes, device.permitted(config.devices) == 1)
        said += of_mode
    else:
        tries = "precision" in config.undecided and begin.saved is None and device.has_bf16(own)
        config, said = defaults.without_device(config, text.stores, nodes, begin.saved, begin.initial)
        said = [sentence for sentence in said if not sentence.startswith("precision")]
        said += ["precision: when training begins, by trying both; here, fp32"] * tries
    for sentence in said:
        page.line("decided", sentence)
    return config


def _memory(page: Page, config: Config, nodes: Sequence[int], own: torch.device, needs: Needs, batch: float) -> None:
    most = device.memory(own, config.devices, max(Counter(nodes).values()))
    if needs.vectors > most:
        raise UserError(
            f"model: its vectors in mode {config.mode} need {size(needs.vectors)} of each rank, which has {size(most)}; choose"
            " a smaller model.preset, fewer ranks per machine, or other devices"
        )
    total = needs.vectors + batch + _PROGRAM
    page.line(
        "memory", f"about {size(total)} of each rank's {size(most)}: vectors {size(needs.vectors)}, batch {size(batch)},"
        f" program {size(_PROGRAM)}",
        "lower batch.tokens, or choose a smaller model.preset" * (total > _MUCH * most),
    )  # fmt: skip


def _words(page: Page, config: Config, stores: Stores) -> float:
    """Print the size of the first epoch, and return its number of target words."""
    kept, means = [], []
    for (source, target), its in zip(stores.lengths(), stores.identity, strict=True):
        good = (np.minimum(source, target) > 0) & (np.maximum(source, target) <= config.corpus.max_length)
        kept.append(np.broadcast_to(np.int64(0), round(its["pairs"] * float(good.mean()))))
        means.append(float((target[good] + 1).mean()))
    mixture = Mixture(config.corpus, kept, config.seed)
    counts = mixture.counts(0)
    words = sum(pairs * mean for pairs, mean in zip(counts, means, strict=True))
    page.line("epoch", f"about {amount(words)} words in {amount(sum(counts))} pairs")
    for sentence in mixture.described():
        page.line("", sentence)
    return words


def _disks(page: Page, config: Config, needs: Needs, parameters: float, text: Text, begin: Beginning) -> None:
    """Print what checkpoints and tokenized corpora take. parameters: their bytes. Raises UserError if there is no room."""
    best = len(config.validation.names(config.corpus.validation_sets)) if config.validation.every else 0
    more = 1 if begin.saved is not None else config.checkpoint.keep + 1  # the next is complete before the oldest is removed
    run = expanded(config.run)
    corpus, store = config.corpus, 0.0
    folders = cache.folders(corpus.cache, run / "store")
    for number, (source, target) in enumerate(text.stores.lengths()):
        if not is_built(corpus.parts[number], corpus.label(number), text.vocabulary, folders):
            words = float(source.mean() + target.mean()) * (2 if max(as_list(text.pieces)) <= 1 << 16 else 4)
            store += text.stores.identity[number]["pairs"] * (16 + words)
    places = {
        "checkpoints": (run, needs.checkpoint * more + parameters * best, "run"),
        "tokenized": (folders[0], store, "corpus.cache"),
    }
    before = Counter[int]()  # bytes that are needed on a disk, by its number
    for what, (folder, needed, key) in places.items():
        disk = _existing(folder)
        free = shutil.disk_usage(disk).free
        before[disk.stat().st_dev] += round(needed)
        if before[disk.stat().st_dev] > free:
            raise UserError(
                f"{key}: {folder} needs about {size(needed)}, but its disk has {size(free)} free; free some space, or choose"
                " another folder"
            )
        page.line(what, f"about {size(needed)} in {folder}, whose disk has {size(free)} free")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
