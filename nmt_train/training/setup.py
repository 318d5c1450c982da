"""Begin a run or continue it where it stopped, as rank 0 or as another rank, and log a summary at the end."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from nmt_train import config as configuration
from nmt_train import device
from nmt_train.common.errors import UserError
from nmt_train.common.metric import is_worst
from nmt_train.common.plural import counted
from nmt_train.common.section import as_list
from nmt_train.common.yaml_file import flatten
from nmt_train.config import Config
from nmt_train.config_text import to_yaml
from nmt_train.corpus.batches import Batches
from nmt_train.corpus.store import Stores
from nmt_train.corpus.swapped import EXCHANGED
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.launch.stop_request import StopRequest
from nmt_train.model.metrics import TestSets
from nmt_train.model.transformer import Transformer
from nmt_train.model_formats import card
from nmt_train.optim.optimizer import state_names
from nmt_train.run.folder import Run
from nmt_train.run.log import Log, rewind_metrics, rewind_spans
from nmt_train.run.progress import Progress
from nmt_train.run.stopping import Patience, shortened
from nmt_train.run.trackers import TrackedRun
from nmt_train.strategy.plan import Plan
from nmt_train.training.config_changes import change_order
from nmt_train.training.follower import Follower
from nmt_train.training.leader import Leader
from nmt_train.training.leader_state import LeaderState
from nmt_train.training.prepared_run import PreparedRun
from nmt_train.training.recovery import RecoveredState
from nmt_train.training.worker import Make, Worker
from nmt_train.transport import Transport


def lead(worker: Worker, prepared: PreparedRun, stop_request: StopRequest, recovered: RecoveredState | None = None) -> int:
    """Train as rank 0; returns the exit status. recovered: given if training continues without ranks that have ended."""
    run, config = prepared.run, worker.config
    if recovered is None and isinstance(worker.batches, Batches):
        check_steps(config, worker.plan, worker.batches.target_tokens, worker.transport.size)
    test_sets = TestSets(config.corpus, prepared.vocabulary)
    tokenizers = test_sets.tokenizers(config.validation)
    patience = Patience(config.stop, len(config.corpus.stages), test_sets.tests(config.validation))
    state = LeaderState(Progress(), patience, prepared.vocabulary, prepared.stores.identity)
    if recovered is not None:
        state.load_facts(recovered.leader)
    elif prepared.saved is not None:
        snapshot = state.load(prepared.saved, worker.flat, bool(config.optimizer.smoothing))
        if change_order(prepared.forced):
            state.begin_epoch(snapshot)
    else:
        snapshot = state.begin(prepared.initial, worker.flat, validate=config.validation.every is not None)
    if prepared.overwrite and recovered is None:
        run.empty()
    in_force = worker.plan.reasons
    run.begin(_explained(config, in_force, prepared), prepared.vocabulary.model, prepared.simulated)
    if prepared.auto is not None and recovered is None:
        prepared.auto.write(run.folder)
    updates = max(state.progress.updates, recovered.part.numbers["updates"] if recovered else 0)  # the shards may be newer
    rewind_metrics(run.folder / "metrics.jsonl", updates, keep="recovery" if recovered else "")
    if recovered is None:
        rewind_spans(run.folder / "trace", state.progress.updates if prepared.saved is not None else -1)
    keys = configuration.plain(config)
    tracked = TrackedRun(run.folder, keys, flatten(keys), updates)
    log = Log.open(run.folder, config.log, bool(prepared.simulated), tracked)
    try:
        if prepared.overwrite and recovered is None:
            log.say(f"started over: deleted the previous contents of {run.folder} (--overwrite)")
        if patience.forgotten:
            log.say(
                f"warning: forgot the best {', '.join(patience.forgotten)}: the validation set or the settings have changed, so"
                " that new values cannot be compared with it"
            )
        leader = Leader(worker, run, log, state, test_sets, bool(prepared.simulated))
        if recovered is None and not prepared.simulated:
            _warn_of_full_disk(worker, run, log)
        stop_request.tell(leader.ask)
        if recovered is None:
            leader.begin(snapshot)
            del snapshot  # free it: it is as large as the state of all ranks
            for label in test_sets.swapped(config.corpus, prepared.stores):
                log.say(f"warning: {label}: {EXCHANGED}")
            _introduce(worker, log, prepared, in_force, tokenizers)
        else:
            leader.resume_from(recovered.part, recovered.data_shard, recovered.stages, "the surviving ranks' state")
            state.progress.start_clock(worker.transport.now, recovered.leader["clock"])
        if worker.transport.ended:
            lost, repeated = (recovered.lost, recovered.repeated_batches) if recovered else (0, 0)  # 0: training had not begun
            log.lost(state.progress, worker.transport.ended, worker.transport.size, lost, repeated)
            if prepared.auto is not None and (sentence := prepared.auto.review(worker.transport)):
                log.say(f"mode auto: {sentence}")
        try:
            leader.start_first_batch(recovered is not None)
            worker.run(leader)
        except Exception:
            leader.complete_checkpoint()
            raise
        _summary(leader, config, state, run, log)
        if config.log.trackers and (last := run.last()) is not None:
            log.trackers.finish(card.of_run(last, config.model), sorted(run.folder.glob("*.png")))
    finally:
        log.close()
    return 128 + leader.signal if leader.signal else 0


def follow(worker: Worker, stop_request: StopRequest, recovered: RecoveredState | None = None) -> int:
    """Train as another rank."""
    follower = Follower(worker)
    stop_request.tell(follower.ask)
    if recovered is None:
        follower.begin()
    else:
        follower.resume_from(
            recovered.part, recovered.data_shard, recovered.leader["progress"]["epochs"], "the surviving ranks' state"
        )
    worker.run(follower)
    return 0


def maker(config: Config, own: torch.device, vocabulary: Vocabulary, stores: Stores) -> Make:
    """A function that builds a worker on `own` from a config and a transport; UserError if the mode or the corpus is wrong."""
    batches = Batches(stores, config.corpus, config.batch, vocabulary, config.seed)

    def make(config: Config, transport: Transport) -> Worker:
        torch.manual_seed(config.seed)
        model = Transformer(config.model, vocabulary.size).to(own)
        if config.compile:
            model.compile_layers(partial(device.compiled, own=own))
        if transport.rank:
            torch.manual_seed(config.seed + 0x9E3779B9 * transport.rank)  # every worker draws different dropout masks
        return Worker(config, transport, model, batches)

    return make


def check_steps(config: Config, plan: Plan, target_tokens: Callable[[], Sequence[int]], workers: int) -> None:
    """Raise UserError if training ends before the first update or exchange. target_tokens: of each batch of an epoch."""
    every = plan.local.every if plan.local_steps else 0
    spans = [span for span in config.stop.after if span.unit in ("e", "t")]  # other units give no number of steps
    if not spans or (not every and config.batch.accumulate == 1):
        return
    tokens, each = target_tokens(), f"each of {workers} workers" if workers > 1 else "the worker"
    for span in spans:
        steps = len(tokens) * (span.amount if span.unit == "e" else span.amount / sum(tokens)) / workers
        if 1 < config.batch.accumulate > steps:
            raise UserError(
                f"batch.accumulate: {config.batch.accumulate} batches for an update are more than {each} has in"
                f" total (stop.after {span}: about {steps:.0f}); give fewer"
            )
        if every and steps < every:
            raise UserError(
                f"local.every: {every} steps are more than {each} makes in total (stop.after {span}: about"
                f" {steps:.0f}); give fewer, or 0 to exchange once, at the end"
            )


def _explained(config: Config, in_force: Mapping[str, str], prepared: PreparedRun) -> str:
    """The configuration as YAML, below comments with the settings in force, forced differences, and a note if simulated."""
    lines = [f"in force: {name}: {value}" for name, value in in_force.items()]
    lines += [f"forced: {difference}" for difference in prepared.forced]
    lines += [f"decided: {sentence}" for sentence in prepared.decided]
    lines += [f"mode auto: {sentence}" for sentence in _of_choice(prepared)]
    lines += ["simulated: all times are virtual; simulated.yml has the cluster"] * bool(prepared.simulated)
    given = dataclasses.replace(config, mode=None) if prepared.mode_chosen else config
    return "".join(f"# {line}\n" for line in lines) + to_yaml(given)


def _of_choice(prepared: PreparedRun) -> Sequence[str]:
    return prepared.auto.sentences if prepared.auto is not None else ()


def _warn_of_full_disk(worker: Worker, run: Run, log: Log) -> None:
    """Warn if the disk has no space for the parameters and the optimizer's vectors of a checkpoint."""
    vectors = 1 + len(state_names(worker.plan.optimizer)) + (worker.config.optimizer.smoothing > 0)
    needed, free = 4.0 * worker.flat.parameters.numel() * vectors, float(shutil.disk_usage(run.folder).free)
    if free < needed:
        log.say(
            f"warning: run: {run.folder} needs about {needed / 1e6:,.1f} MB for each checkpoint, but its disk has"
            f" {free / 1e6:,.1f} MB free; free some space, or choose another folder"
        )


def _introduce(worker: Worker, log: Log, prepared: PreparedRun, in_force: Mapping[str, str], tokenizers: Sequence[str]) -> None:
    for complaint in prepared.damaged:
        log.say(f"warning: {complaint}")
    for difference in prepared.forced:
        log.say(f"warning: --force: {difference}")
    if change_order(prepared.forced):
        log.say(f"warning: --force: epoch {worker.progress.epochs + 1} begins, because its batches have changed")
    log.begun(worker.progress, in_force, prepared.forced)
    config, batches, transport = worker.config, worker.batches, worker.transport
    where = "" if transport.size == 1 else f", {transport.size} ranks on {', '.join(dict.fromkeys(transport.hosts))}"
    pieces = " + ".join(f"{size:,}" for size in as_list(prepared.vocabulary.size))
    frozen = f"trained and {worker.flat.frozen.vector.numel():,} frozen " if worker.flat.frozen else ""
    log.say(
        f"{worker.flat.parameters.numel():,} {frozen}parameters, {pieces} pieces, mode {config.mode} on"
        f" {worker.device}, {config.precision}, {counted(torch.get_num_threads(), 'thread')}{where}"
    )
    if slow := device.slow_precision(worker.device, config.precision):
        log.say(f"warning: {slow}")
    if isinstance(batches, Batches):
        where = ", ".join(map(str, dict.fromkeys(batches.stores.paths)))
        log.say(f"corpus: {len(batches):,} pairs; left out: {batches.left_out}; tokenized in {where}")
        for sentence in batches.mixture.described():
            log.say(sentence)
        if prepared.saved is None and (sentence := batches.stores.unknown.described()):
            log.say(sentence)
    for sentence in tokenizers:
        log.say(sentence)
    for sentence in prepared.decided:
        log.say(f"decided: {sentence}")
    for sentence in _of_choice(prepared):
        log.say(f"mode auto: {sentence}")
    if worker.plan.exchanges_once:
        log.say("warning: workers exchange only once, at the end: until then, nothing is logged, validated or saved")
    if prepared.mode_chosen and transport.size > 1:
        log.say(
            f"mode: none is given, so {transport.size} ranks train in mode {config.mode}; docs/modes.md says which modes are"
            " faster on slow networks"
        )
    chosen = ", ".join(f"{name} {value}" for name, value in in_force.items())
    log.say(f"in force: {chosen}{'; all else' if chosen else 'everything'} as in {prepared.run.folder / 'config.yml'}")
    if prepared.simulated:
        log.say("simulated: all times except the log's own are virtual")
    if prepared.initial is not None:
        log.say(f"init: parameters and vocabulary of {prepared.initial.path}")
    if prepared.saved is not None:
        if config.init and config.init != prepared.saved.facts["config"].get("init"):
            log.say(f"warning: init: {config.init} is ignored: the run has already begun")
        log.say(f"continuing from {prepared.saved.path} at update {worker.progress.updates:,}")


def _summary(leader: Leader, config: Config, state: LeaderState, run: Run, log: Log) -> None:
    progress, say, folder = state.progress, log.say, run.folder
    hours, seconds = divmod(round(progress.seconds), 3600)
    unfinished = config.stop.unfinished(progress, leader.pairs)
    say(f"stopped: {leader.reason}{f' after {unfinished}' if unfinished else ''}")
    for metric, verdict in state.patience.verdicts.items():
        if not is_worst(metric, verdict.best):
            say(f"best {metric} {verdict.best:.4f}: {folder / f'best-{metric}'}")
    say(
        f"{counted(progress.updates, 'update')}, {counted(shortened(progress.epochs_trained(leader.pairs)), 'epoch')},"
        f" {counted(progress.tokens, 'word')} in {hours}:{seconds // 60:02}:{seconds % 60:02},"
        f" {progress.tokens / max(progress.training_seconds, 1e-9):.0f} words/s without validation"
    )
    say(f"everything is in {folder}; translate with: nmt-translate --model {folder} < in > out")
