"""Prepare a run: lock its folder, find the checkpoint or the model to begin with, the vocabulary and the tokenized corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from nmt_train.common import launcher
from nmt_train.common.errors import UserError
from nmt_train.common.paths import expanded
from nmt_train.common.section import as_list
from nmt_train.config import Config
from nmt_train.corpus import cache
from nmt_train.corpus.batches import check_batch_size, check_settings
from nmt_train.corpus.file_checks import file_checks
from nmt_train.corpus.new_pieces import extended, extends
from nmt_train.corpus.store import Stores, open_stores
from nmt_train.corpus.survey import Survey
from nmt_train.corpus.train_vocabulary import trained
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.corpus.vocabulary_config import VocabularyConfig
from nmt_train.model import SEPARATE
from nmt_train.model.metrics import TestSets
from nmt_train.modes.auto import AUTO
from nmt_train.modes.resolve import optimizer_name
from nmt_train.optim.optimizer import state_names
from nmt_train.run.checkpoint import Checkpoint
from nmt_train.run.folder import Run, newest
from nmt_train.run.manifest import load_verified
from nmt_train.run.trackers import check_installed
from nmt_train.training.auto_mode import ChosenMode
from nmt_train.training.config_changes import FIXED, contradictions, corpus_differences, differences, saved_keys


@dataclass
class PreparedRun:
    """Everything that rank 0 prepares before training begins.

    saved: the checkpoint to continue from, or None. initial: the checkpoint with whose parameters a new run begins, or None.
    damaged: what is wrong with newer checkpoints. overwrite: whether to empty the run folder. forced: the differences from the
    run's configuration and corpus that --force allows. simulated: the cluster (YAML) if time is virtual, else empty.
    mode_chosen: whether the number of ranks has decided the mode. auto: what `mode: auto` has chosen. decided: sentences about
    other values that the configuration leaves open.
    """

    run: Run
    saved: Checkpoint | None
    damaged: list[str]
    vocabulary: Vocabulary
    stores: Stores
    overwrite: bool
    initial: Checkpoint | None = None
    forced: Sequence[str] = ()
    simulated: str = ""
    mode_chosen: bool = False
    auto: ChosenMode | None = None
    decided: Sequence[str] = ()


@dataclass(frozen=True)
class Beginning:
    """What a run begins with: the fields are as in `PreparedRun`."""

    saved: Checkpoint | None
    damaged: list[str]
    initial: Checkpoint | None
    forced: list[str]

    @classmethod
    def of(cls, run: Run, config: Config, force: bool, overwrite: bool, trains: bool = True) -> Beginning:
        """Find it. Raises UserError if there is no intact checkpoint, or if the configuration does not fit the one there is."""
        saved, damaged = (None, []) if overwrite else _newest(run)
        forced = _compare(saved, config, force) if saved is not None and trains else []
        return cls(saved, damaged, _initial(config) if saved is None and config.init else None, forced)

    def vocabulary(self, run: Run, config: Config, overwrite: bool) -> Vocabulary | None:
        """The vocabulary, or None if the run has to train one. Raises UserError if the configuration asks for another."""
        return _inherited(self.initial, config) if self.initial else _vocabulary(run, config, self.saved, overwrite)


@contextmanager
def opened(
    config: Config, force: bool, overwrite: bool, simulated: str = "", mode_chosen: bool = False, trains: bool = True
) -> Iterator[PreparedRun]:
    """Lock the run folder and prepare the run. UserError for errors that a user can fix; it leaves a previous run unchanged.

    trains: False if a run in this folder will not continue, so that its configuration need not be the same.
    """
    check_installed(config.log.trackers)
    check_files(config)
    if trains and not overwrite:
        Run(expanded(config.run)).refuse_foreign()
    run = Run.open(expanded(config.run), patient=launcher.restarted())
    try:
        if not overwrite:
            run.refuse_other_kind(bool(simulated))
            if launcher.begun_before():
                run.refuse_elsewhere()
        begin = Beginning.of(run, config, force, overwrite, trains)
        saved, forced, survey = begin.saved, begin.forced, Survey(config.corpus)
        vocabulary = begin.vocabulary(run, config, overwrite)
        if vocabulary is None:
            vocabulary = trained(config.corpus, cache.folders(config.corpus.cache, _fallback(run)), survey)
        if saved is not None and trains:
            saved.expect(vocabulary)  # before its corpora, which are identified by their pieces
        _check_tying(config, vocabulary)
        check_settings(config.corpus, vocabulary)
        TestSets(config.corpus, vocabulary)  # which finds errors; tokenizing the corpus takes longer
        stores = open_stores(config.corpus, vocabulary, _fallback(run), survey)
        if saved is not None and trains:
            forced += _compare_corpora(saved, config, stores, force)
        yield PreparedRun(
            run, saved, begin.damaged, vocabulary, stores, overwrite, begin.initial, forced, simulated, mode_chosen
        )
    finally:
        run.close()


@contextmanager
def taken_over(
    config: Config, vocabulary: Vocabulary, stores: Stores, auto: ChosenMode | None, overwrite: bool, begun: bool
) -> Iterator[PreparedRun]:
    """Lock the run folder of an ended rank 0, or create one if this machine cannot see it.

    begun: whether training had begun, so that the surviving ranks have its state, and checkpoints are not needed.
    """
    run = Run.open(expanded(config.run), patient=True)
    try:
        saved, damaged = (None, []) if begun or overwrite else _newest(run)
        initial = _initial(config) if saved is None and config.init and not begun else None
        yield PreparedRun(run, saved, damaged, vocabulary, stores, overwrite and not begun, initial, auto=auto)
    finally:
        run.close()


def check_files(config: Config) -> None:
    """Find errors in the corpus files before a vocabulary is trained and a corpus is tokenized."""
    if "batch.tokens" not in config.undecided:
        check_batch_size(config.corpus, config.batch)
    for check in file_checks(config.corpus):
        check()


def _newest(run: Run) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that passes verification, and what is wrong with newer ones. UserError if none of them passes."""
    damaged: list[str] = []
    for path in reversed(run.checkpoints()):
        try:
            return load_verified(path), damaged
        except UserError as error:
            damaged.append(str(error).partition(";")[0])  # without its advice, because this looks for another one
    if damaged:
        raise UserError(f"{damaged[0]}; no checkpoint of the run is intact: start over with --overwrite")
    return None, []


def _initial(config: Config) -> Checkpoint:
    """The checkpoint that `init` names; UserError if the configuration gives its model other sizes."""
    initial = load_verified(newest(expanded(str(config.init)), 1)[0])
    if unlike := contradictions(config, initial.facts["config"]):
        preset = "" if "model.preset" in config.undecided else " and model.preset"
        raise UserError(
            f"init: {initial.path} needs {', '.join(unlike)}; remove these keys{preset}, which then are as in this model, or"
            " use another one"
        )
    return initial


def _compare(saved: Checkpoint, config: Config, force: bool) -> list[str]:
    """The differences from the saved configuration; UserError for those that --force does not allow, or all without --force."""
    old = saved_keys(saved.facts["config"])
    mode = old["mode"] if config.mode == AUTO else config.mode  # a run keeps what mode auto has chosen
    before = optimizer_name(old["mode"], old["optimizer.name"])
    now = optimizer_name(mode, config.optimizer.name)
    own, wanted = (replace(config.optimizer, name=name) for name in (before, now))
    if before != now and state_names(own) != state_names(wanted):
        raise UserError(
            f"optimizer.name: run {config.run} has begun with {before}, and its checkpoints do not fit {now}"
            f"{'' if config.optimizer.name else f', which mode {config.mode} uses'}; add --optimizer.name {before}, or choose"
            " another run folder"
        )
    changed = differences(saved.facts["config"], config)
    fixed = [difference for difference in changed if difference.split(" was ")[0] in FIXED]
    if fixed:
        raise UserError(
            f"run: {config.run} cannot change what it began with, not even with --force: {'; '.join(fixed)}; restore it,"
            " choose another run folder, or start over with --overwrite"
        )
    if changed and not force:
        raise UserError(
            f"run: {config.run} was started with another configuration: {'; '.join(changed)}; restore it, choose another run"
            " folder, or continue anyway with --force"
        )
    return changed


def _compare_corpora(saved: Checkpoint, config: Config, stores: Stores, force: bool) -> list[str]:
    """The differences from the training corpora of the checkpoint; UserError if there are any, without --force."""
    changed = corpus_differences(saved.facts["corpora"], stores, config.corpus)
    if changed and not force:
        raise UserError(
            f"run: {config.run} was trained on another corpus: {'; '.join(changed)}; restore it, choose another run folder, or"
            " continue with a new epoch of this corpus with --force"
        )
    return changed


def _check_tying(config: Config, vocabulary: Vocabulary) -> None:
    if isinstance(vocabulary.size, list) and config.model.tied == "all" and "model.tied" not in config.undecided:
        raise UserError(f"model.tied {SEPARATE}")


def _fallback(run: Run) -> Path:
    """The folder of the tokenized corpus if the user's cache cannot be written."""
    return run.folder / "store"


def _vocabulary(run: Run, config: Config, saved: Checkpoint | None, overwrite: bool) -> Vocabulary | None:
    """The vocabulary of the run (unless `overwrite`), else the given one, else the checkpoint's, else none.

    A start that made no checkpoint has left its config.yml and a vocabulary, perhaps of other text.
    """
    path, wanted = run.folder / "vocabulary.model", config.corpus.vocabulary
    given = _given(wanted)
    if overwrite or not path.exists() or (saved is None and (run.folder / "config.yml").exists()):
        return given if given is not None or saved is None else saved.vocabulary()
    vocabulary = Vocabulary.load(path)
    if given is not None and given.digest != vocabulary.digest:
        raise UserError(
            f"corpus.vocabulary.path: {wanted.path} is not the vocabulary that run {run.folder} began with ({path}); remove the"
            " key, or choose another run folder"
        )
    if given is None and saved is None and not _as_wanted(vocabulary, wanted):
        raise UserError(
            f"{path}: has {vocabulary.size} pieces, but corpus.vocabulary.size is {wanted.size}; delete it, or name it as"
            " corpus.vocabulary.path"
        )
    return vocabulary


def _given(wanted: VocabularyConfig) -> Vocabulary | None:
    """The vocabulary that the configuration names."""
    try:
        return Vocabulary.load(wanted.path) if wanted.path else None
    except UserError as error:
        raise UserError(f"corpus.vocabulary.path: {error}") from None


def _as_wanted(vocabulary: Vocabulary, wanted: VocabularyConfig) -> bool:
    """Whether the vocabulary may be one that a run with this configuration has trained."""
    sizes = as_list(vocabulary.size)
    if wanted.type in ("char", "word"):  # of which there may be fewer
        return len(sizes) == len(wanted.sizes) and all(map(int.__le__, sizes, wanted.sizes))
    return sizes == wanted.sizes


def _inherited(initial: Checkpoint, config: Config) -> Vocabulary:
    """The vocabulary of the checkpoint that `init` names, with the new pieces that the configuration gives.

    Raises UserError if the configuration gives another vocabulary.
    """
    wanted, vocabulary = config.corpus.vocabulary, initial.vocabulary()
    given = _given(wanted)
    if given is not None:
        if not extends(given, vocabulary):
            raise UserError(
                f"corpus.vocabulary.path: {wanted.path} is not the vocabulary of {initial.path}, which init names, nor one that"
                " begins with its pieces; remove the key: the run then uses that vocabulary"
            )
        return given
    if wanted.size not in (vocabulary.size, VocabularyConfig().size):
        raise UserError(
            f"corpus.vocabulary.size: is {wanted.size}, but the vocabulary of {initial.path}, which init names, has"
            f" {vocabulary.size} pieces; remove the key"
        )
    return extended(vocabulary, wanted.user_defined or [])
