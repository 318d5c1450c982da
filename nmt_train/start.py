"""Begin a run, or continue it where it stopped; and sum it up at the end."""

from __future__ import annotations

from pathlib import Path

import torch

from nmt_train import checkpoint, device, modes
from nmt_train import config as configuration
from nmt_train.checkpoint import Checkpoint
from nmt_train.config import Config
from nmt_train.corpus.text import read_lines, read_pairs, sides
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.corpus.vocabulary import train as train_vocabulary
from nmt_train.errors import UserError
from nmt_train.log import Log, rewind_metrics
from nmt_train.run import Run
from nmt_train.train import Trainer


def start(config: Config, force: bool, overwrite: bool) -> int:
    """Train as `config` says; returns the exit status: 0, or 128 + the signal that ended it.

    force: continue although the configuration changed; overwrite: forget what the run folder holds. UserError for all that
    a user can mend; the run folder is then as it was.
    """
    device.prepare(config.threads)
    _check_early(config)
    run = Run.open(Path(config.run).expanduser())
    try:
        saved, damaged = (None, []) if overwrite else _newest(run)
        if saved is not None:
            _compare(saved, config, force)
        vocabulary = _vocabulary(run, config, saved, overwrite)
        trainer = Trainer(config, run, vocabulary)
        if saved is not None:
            trainer.state.load(saved, vocabulary)
        if overwrite:
            run.empty()
        run.begin(configuration.to_yaml(config), vocabulary.model)
        rewind_metrics(run.folder / "metrics.jsonl", trainer.state.progress.updates)
        log = Log.open(run.folder, config.log)
        try:
            _introduce(trainer, log, saved, damaged)
            with trainer.signals():
                reason = trainer.train(log)
            _summary(trainer, reason)
        finally:
            log.close()
    finally:
        run.close()
    return 128 + trainer.signal if trainer.signal else 0


def _check_early(config: Config) -> None:
    """What would be a pity to find only after a vocabulary was trained and a corpus tokenised."""
    modes.check(config.mode, device.choose(config.devices))
    for path in (path for side in sides(config.corpus.train, "corpus.train") for path in side):
        next(read_lines(path), None)
    for _ in read_pairs(config.corpus.valid, "corpus.valid"):
        pass


def _introduce(trainer: Trainer, log: Log, saved: Checkpoint | None, damaged: list[str]) -> None:
    for complaint in damaged:
        log.say(f"warning: {complaint}")
    config, batches = trainer.config, trainer.batches
    log.say(
        f"{trainer.state.flat.parameters.numel():,} parameters, {len(trainer.vocabulary):,} pieces, mode {config.mode} on"
        f" {trainer.device}, {config.precision}, {torch.get_num_threads()} threads"
    )
    log.say(f"corpus: {len(batches):,} pairs; left out: {batches.left_out}; tokenised in {batches.store.path}")
    if saved is not None:
        log.say(f"continuing from {saved.path} at update {trainer.state.progress.updates:,}")


def _newest(run: Run) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that passes verification, and what is wrong with newer ones."""
    damaged: list[str] = []
    for path in reversed(run.checkpoints()):
        try:
            return checkpoint.load(path), damaged
        except UserError as error:
            damaged.append(str(error))
    if damaged:
        raise UserError(f"{damaged[0]}; no checkpoint of the run is whole: start anew with --overwrite")
    return None, []


def _compare(saved: Checkpoint, config: Config, force: bool) -> None:
    changed = configuration.differences(saved.facts["config"], config)
    if changed and not force:
        raise UserError(
            f"run: {config.run} was started with another configuration: {'; '.join(changed)}; restore it, choose another run"
            " folder, or continue all the same with --force"
        )


def _vocabulary(run: Run, config: Config, saved: Checkpoint | None, overwrite: bool) -> Vocabulary:
    """The run's vocabulary: the one it has (unless it is to be forgotten), else a given one, else one trained on the corpus."""
    path, wanted = run.folder / "vocabulary.model", config.corpus.vocabulary
    given = Vocabulary.load(wanted.path) if wanted.path else None
    if overwrite or not path.exists():
        return given or (saved.vocabulary() if saved else train_vocabulary(config.corpus))
    vocabulary = Vocabulary.load(path)
    if given is not None and given.digest != vocabulary.digest:
        raise UserError(
            f"corpus.vocabulary.path: {wanted.path} is not the vocabulary that run {run.folder} began with ({path})"
        )
    if given is None and saved is None and len(vocabulary) != wanted.size:
        raise UserError(
            f"{path}: has {len(vocabulary)} pieces, but corpus.vocabulary.size is {wanted.size}; delete it, or name it as"
            " corpus.vocabulary.path"
        )
    return vocabulary


def _summary(trainer: Trainer, reason: str) -> None:
    progress, say, folder = trainer.state.progress, trainer.log.say, trainer.run.folder
    hours, seconds = divmod(round(progress.seconds), 3600)
    say(f"stopped: {reason}")
    for metric, verdict in trainer.state.patience.verdicts.items():
        say(f"best {metric} {verdict.best:.4f}: {folder / f'best-{metric}'}")
    say(
        f"{progress.updates:,} updates, {progress.epochs} epochs, {progress.tokens:,} words in"
        f" {hours}:{seconds // 60:02}:{seconds % 60:02}, {progress.tokens / max(progress.training_seconds, 1e-9):.0f} words/s"
        " without validation"
    )
    say(f"everything is in {folder}; translate with: nmt-translate --model {folder} < in > out")
