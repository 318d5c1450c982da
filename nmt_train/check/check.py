"""nmt-train --check: what can be known in seconds about a training, from the functions with which it would begin."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from nmt_train.check import corpora, resources
from nmt_train.check.page import Page
from nmt_train.common.paths import expanded
from nmt_train.common.plural import counted
from nmt_train.common.section import as_list
from nmt_train.config import Config
from nmt_train.corpus import cache
from nmt_train.corpus.batches import check_settings
from nmt_train.corpus.file_checks import file_checks
from nmt_train.corpus.store import check_tags
from nmt_train.corpus.train_vocabulary import cached, refuse_long, train
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.model.metrics import TestSets
from nmt_train.modes.auto import AUTO
from nmt_train.modes.resolve import choose_mode
from nmt_train.run.folder import Run
from nmt_train.run.trackers import check_installed
from nmt_train.training.prepared_run import Beginning

_LARGE = 32_000  # pieces, at most, of a vocabulary that stands for one that cannot be trained
_TOGETHER = "sync"  # stands for what `mode: auto` will choose


def check(config: Config, nodes: Sequence[int], own: torch.device, force: bool, overwrite: bool) -> None:
    """Print the page. Nothing is written, and nothing is trained, except for trials of the batch size on a GPU.

    nodes: the machine of each rank. own: a device of this machine. Raises UserError with the reasons that were found why
    training could not begin or continue.
    """
    page = Page()
    with page.going_on():
        _print(page, config, nodes, own, force, overwrite)
    if page.reasons:
        page.refuse()
    print(f"Nothing prevents training ({counted(page.warnings, 'warning')}).")


def _print(page: Page, config: Config, nodes: Sequence[int], own: torch.device, force: bool, overwrite: bool) -> None:
    """Print the page. Raises UserError for a reason without which nothing further can be known."""
    corpus, run = config.corpus, Run(expanded(config.run))
    for check_files in file_checks(corpus):
        with page.going_on():
            check_files()
    if page.reasons:
        return  # nothing is known of text that cannot be read
    with page.going_on():
        check_installed(config.log.trackers)
    if not overwrite:
        with page.going_on():
            run.refuse_foreign()
            run.refuse_other_kind(simulated=False)
    begin = Beginning.of(run, config, force, overwrite)
    found = corpora.read(corpus)
    vocabulary, pieces, origin = _vocabulary(page, config, run, begin, found, overwrite)
    for check_pieces in (check_settings, check_tags):
        with page.going_on():
            check_pieces(corpus, vocabulary)
    test_sets = TestSets(corpus, vocabulary)
    stores = corpora.sampled(corpus, found, vocabulary)
    corpora.describe(page, corpus, found, stores, test_sets)
    with page.going_on():
        found.survey.check_lengths(lambda lines, side: [*map(len, vocabulary.encode(lines, side))])
    page.title("training")
    page.line("run", _of_run(run, begin, overwrite), "; ".join(begin.damaged))
    page.line("vocabulary", f"{' and '.join(f'{number:,}' for number in as_list(pieces))} pieces, {origin}")
    for sentence in test_sets.tokenizers(config.validation):
        page.line("", sentence)
    if config.mode == AUTO:
        page.line("mode", f"auto: decided on the machines; here, {_TOGETHER} stands for it")
        config = dataclasses.replace(config, mode=_TOGETHER if len(nodes) > 1 else None)
    text = resources.Text(stores, vocabulary, pieces)
    resources.describe(page, choose_mode(config, len(nodes)), nodes, own, text, begin)


def _vocabulary(
    page: Page, config: Config, run: Run, begin: Beginning, found: corpora.Read, overwrite: bool
) -> tuple[Vocabulary, int | list[int], str]:
    """The vocabulary of the run, or one that stands for it; the number of its pieces; and where it is from."""
    wanted = config.corpus.vocabulary
    known = begin.vocabulary(run, config, overwrite)
    if known is not None:
        return known, known.size, "which exist already"
    known = cached(config.corpus, cache.folders(config.corpus.cache, run.folder / "store"))
    if known is not None:
        return known, known.size, "trained earlier on this text"
    refuse_long(found.survey)
    with page.going_on():
        made = train(config.corpus, found.survey, fewer=not found.survey.complete)
        stands = "" if found.survey.complete else "; here, one trained on fewer lines stands for it"
        return made, wanted.size, f"to be trained{stands}"
    size = [_LARGE] * 2 if wanted.separate else _LARGE
    large = dataclasses.replace(config.corpus, vocabulary=dataclasses.replace(wanted, size=size))
    made = train(large, found.survey, fewer=True)
    return made, made.size, "because of corpus.vocabulary.size, another size stands for it"


def _of_run(run: Run, begin: Beginning, overwrite: bool) -> str:
    """What happens to the run folder."""
    if begin.saved is not None:
        return f"continues from {begin.saved.path}"
    if begin.initial is not None:
        return f"begins in {run.folder} with the model in {begin.initial.path}"
    return f"begins in {run.folder}{', which is emptied (--overwrite)' if overwrite and run.checkpoints() else ''}"
