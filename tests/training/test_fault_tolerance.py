"""Ranks that end during training: what still holds then, whenever it happens.

Batches have numbers, and parameters count which batch's gradient was applied to which part of them (ledger.py), so that nothing
can be lost or doubled unseen. scripts/soak tries thousands of seeds.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import ledger
import pytest
import torch
from conftest import Make
from pulled import Vector, settings, strategy_of
from simulated import REPEATED, events
from virtual import engine, together

from nmt_train.config import Config
from nmt_train.modes.table import MODES
from nmt_train.optim.flat_model import FlatModel
from nmt_train.run import checkpoint
from nmt_train.run.folder import Run
from nmt_train.server.overlap import Overlap
from nmt_train.simulation.cluster import Cost, Cut, Kill, Straggler
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.strategy.state import WorkerState
from nmt_train.training import recovery as recover
from nmt_train.training.data_balance import DataBalancer
from nmt_train.training.worker import Worker
from nmt_train.transport import Lost

_GIVEN = os.environ.get("NMT_TRAIN_SEEDS", "")  # first:end
SEEDS = range(*map(int, (_GIVEN or "0:8").split(":")))  # of each mode
FEWER = SEEDS if _GIVEN else SEEDS[:2]
CUTS = SEEDS[::4]
# Modes in which what is applied is counted exactly: with sums instead of means, and codecs that are exact for small counts.
EXACT: dict[str, dict[str, Any]] = {
    "vanilla": {}, "overlap": {}, "downpour": {}, "sync": {}, "pipe": {},
    "local-sgd": {"local__outer": "sum"}, "simuparallel": {"local__outer": "sum"}, "diloco": {"local__outer": "sum"},
    "diloco-async": {"local__outer": "none"}, "sparse-local": {"replicas__codec": "half"},
    "sparse-local-async": {"server__up": "half", "server__down": "half"},
}  # fmt: skip
DELAYED = ("local-sgd", "diloco", "diloco-async", "sparse-local", "sparse-local-async")
OTHERS = tuple(mode for mode in MODES if EXACT.get(mode, True) and mode != "single")  # with the settings of their own
EPOCHS = 3


def trial(make: Make, mode: str, seed: int, **more: Any) -> tuple[ledger.Outcome, list[dict[str, Any]]]:
    """A run on two to four machines of one or two ranks, of which any but one may end at any time; and what it said of that."""
    draw = random.Random(f"{mode} {seed}")
    nodes = [draw.choice([1, 1, 2]) for _ in range(draw.randint(2, 4))]
    doomed = draw.sample(range(sum(nodes)), draw.randint(1, sum(nodes) - 1))
    first = draw.uniform(0.02, 1.2)
    together = draw.random() < 0.5  # within an epoch, or during a recovery
    times = [first + draw.uniform(0, 0.3) if together else draw.uniform(0.02, 2.0) for _ in doomed]
    kills = [Kill(rank, f"{at:.4f}s") for rank, at in zip(doomed, times, strict=True)]
    options = {"recovery__every": draw.choice(["1u", "5u", "0.3s"]), "log__every": "10u"}
    if mode in REPEATED:
        options["local__every"] = 3
    if mode in DELAYED:
        options["local__delay"] = seed % 4
    if draw.random() < 0.3:
        options |= {"checkpoint__every": "20u"}
    options |= more
    config = ledger.plain(make(mode=mode, stop__after=f"{EPOCHS}e", **options))
    around = troubles(draw, nodes)
    outcome = ledger.train(config, nodes, overwrite=True, kills=kills, **around)
    recoveries = events(outcome.folder, "recovery")
    if config.recovery.every.unit == "u" and not more:
        # Since the last copy, what was under way, and what all ranks can compute while a cut keeps copies from leaving.
        gone = sum(cut.until - cut.at for cut in around.get("cuts", []))
        bound = config.recovery.every.amount + sum(nodes) * (3 + gone / ledger.SHORTEST_STEP)
        assert all(event["lost_updates"] <= bound for event in recoveries)
        if mode == "vanilla":  # with a batch to an update
            assert outcome.trained.total() <= EPOCHS * ledger.BATCHES + len(recoveries) * bound
    return outcome, recoveries


def kept(outcome: ledger.Outcome) -> torch.Tensor:
    """The sum of the parameters that the workers of easgd have of their own, in the form of `Outcome.applied`."""
    last = checkpoint.load(outcome.folder / "last")
    workers = (last.tensors(f"worker-{rank}") for rank in range(8) if last.has(f"worker-{rank}"))
    return sum(
        (state["own.elastic_parameters"].view_as(outcome.applied) for state in workers), torch.zeros_like(outcome.applied)
    )


def troubles(draw: random.Random, nodes: list[int]) -> dict[str, Any]:
    """What else goes wrong on the way, and is no reason to end: messages lost, links cut for a while, slow devices."""
    found: dict[str, Any] = {"seed": draw.randrange(1000)}
    if draw.random() < 0.5:
        found |= {"loss": 0.1, "resend": "50ms", "jitter": 0.3}
    if draw.random() < 0.3:
        found["stragglers"] = [Straggler(draw.randrange(sum(nodes)), draw.uniform(2, 5))]
    if draw.random() < 0.5:
        cuts = [(draw.randrange(len(nodes)), draw.uniform(0.02, 1.5)) for _ in range(2)]
        found["cuts"] = [Cut(node, at, at + draw.uniform(0.05, 0.5)) for node, at in dict(cuts).items()]
    return found


def covered(outcome: ledger.Outcome, recoveries: list[dict[str, Any]]) -> torch.Tensor:
    """How often each batch was trained in all epochs together; in every one at least once, and once more for each failure.

    Where a pipeline has just been drained, its end is seen a round later.
    """
    every = [outcome.trained[epoch, batch] for epoch in range(EPOCHS) for batch in range(ledger.BATCHES)]
    assert min(every) >= 1
    assert max(every) <= 1 + len(recoveries)
    late = [outcome.trained[EPOCHS, batch] for batch in range(ledger.BATCHES)]
    if len(recoveries) == 1:
        assert sum(every) + sum(late) >= EPOCHS * ledger.BATCHES + recoveries[0]["batches_again"]
    return torch.tensor(every + late).view(EPOCHS + 1, -1).sum(0)


def check(make: Make, mode: str, seed: int, bundle: int = 1, **options: Any) -> None:
    """bundle: the most pushes of one update."""
    outcome, recoveries = trial(make, mode, seed, **({"server__bundle": bundle} if bundle > 1 else {}), **options)
    trained, applied = covered(outcome, recoveries), outcome.applied
    assert torch.allclose(applied, applied.round(), atol=1e-3)  # means are taken of sums
    assert (applied <= trained + 1e-3).all()
    lost = outcome.together * bundle * sum(event["lost_updates"] for event in recoveries)
    assert (EPOCHS - applied).clamp(min=0).sum(1).max() <= lost + 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", EXACT)
def test_nothing_is_lost_beyond_what_is_said_and_nothing_applied_that_was_not_trained(make: Make, mode: str, seed: int) -> None:
    check(make, mode, seed, **EXACT[mode])


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted({*SEEDS, 38}))
def test_center_and_workers_of_easgd_together_contain_no_batch_more_often_than_it_was_trained(make: Make, seed: int) -> None:
    """What a worker adds to the center is taken from the worker, so that their sum contains every gradient once.

    A lost update of the center may also be one that took from it: a tenth of its distance to a worker.
    """
    outcome, recoveries = trial(make, "easgd", seed)
    trained, applied = covered(outcome, recoveries), outcome.applied + kept(outcome)
    taken = 0.1 * (EPOCHS + 1) * sum(event["lost_updates"] for event in recoveries)
    assert (applied <= trained + taken + 1e-3).all()
    if not recoveries:
        assert torch.allclose(applied, trained.expand_as(applied).to(applied), atol=1e-3)


@pytest.mark.parametrize("seed", [*SEEDS[::10], 68, 88, 140, 144])
def test_a_bundle_of_pushes_that_is_not_complete_is_not_lost(make: Make, seed: int) -> None:
    check(make, "vanilla", seed, bundle=3)


@pytest.mark.parametrize("seed", [*SEEDS[::10], 4, 8, 680])
def test_pushes_that_a_worker_has_given_away_are_not_lost(make: Make, seed: int) -> None:
    """With several pushes between two answers, a shard may not have applied the last ones."""
    check(make, "downpour", seed, server__pull_every=5)


def test_local_steps_are_not_applied_twice_if_a_shard_ends_before_the_first_exchange(make: Make) -> None:
    """The shard has made no update, so all that is known of it are the parameters that workers received at the start."""
    options = {"mode": "diloco-async", "local__outer": "none", "local__every": 3, "log__every": "10u"}
    options |= {"server__up": "dense", "server__down": "dense"}
    config = ledger.plain(make(stop__after=f"{EPOCHS}e", **options))
    outcome = ledger.train(config, [2, 2], kills=[Kill(2, "0.0973s")], seed=22)
    recoveries = events(outcome.folder, "recovery")
    assert [event["lost_updates"] for event in recoveries] == [0]
    assert (outcome.applied <= covered(outcome, recoveries) + 1e-3).all()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["local-sgd", "sparse-local"])
def test_a_sum_that_a_worker_has_applied_is_not_sent_again_if_a_rank_ends_just_then(make: Make, mode: str) -> None:
    slow = dataclasses.replace(ledger.DEVICE, update=Cost("60ms", "0s"))
    options = {"mode": mode, "local__every": 1, "local__delay": 0, "local__outer": "sum", "replicas__codec": "dense"}
    config = ledger.plain(make(stop__after=f"{EPOCHS}e", log__every="10u", **options))
    for at in range(100, 400, 20):  # a step takes about 250 ms, of which applying the sum takes 60
        outcome = ledger.train(config, [1, 1, 1], overwrite=True, device=slow, kills=[Kill(2, f"{at}ms")])
        assert (outcome.applied <= covered(outcome, events(outcome.folder, "recovery")) + 1e-3).all()


@pytest.mark.parametrize(("mode", "seed"), [("overlap", 187), ("overlap", 10), ("local-sgd", 319), ("diloco", 331)])
def test_seeds_that_once_failed(make: Make, mode: str, seed: int) -> None:
    """All that had begun ended at once; a recovery that lost an update was cut short by the next, which said nothing of it; a
    rank ended when it alone had completed an update of all copies, and its batches were not trained again.
    """
    check(make, mode, seed, **EXACT[mode])


@pytest.mark.slow
@pytest.mark.parametrize("seed", CUTS)
@pytest.mark.parametrize("mode", EXACT)
def test_after_a_cut_that_lasts_the_job_ends_by_name_and_goes_on_from_its_checkpoint(make: Make, mode: str, seed: int) -> None:
    draw = random.Random(f"cut {mode} {seed}")
    nodes = [draw.choice([1, 1, 2]) for _ in range(draw.randint(2, 4))]
    options = {"local__every": 3 if mode in REPEATED else None, **EXACT[mode]}
    config = ledger.plain(
        make(mode=mode, stop__after=f"{EPOCHS}e", checkpoint__every="7u", log__every="10u", transport__deadline=2, **options)
    )
    trained: Counter[tuple[int, int]] = Counter()
    node, at = draw.randrange(len(nodes)), draw.uniform(0.1, 1.2)
    try:
        outcome = ledger.train(config, nodes, trained, **troubles(draw, nodes) | {"cuts": [Cut(node, at, at + 60)]})
        last = Run(outcome.folder).last()
        assert last is not None
        assert checkpoint.load(last).facts["progress"]["seconds"] < at, "only a run that ended before the cut may end well"
    except Lost as error:
        assert re.search(r"host node\d\) has been silent for 2 s \(transport.deadline\)", str(error))
    nodes = nodes[: draw.randint(1, len(nodes))]  # those that answer then
    before = trained.copy()
    outcome = ledger.train(config, nodes, trained)
    # A pipeline sees the end a round later where it has just been drained; perhaps in both runs, and then the first one's
    # round is in the parameters only if a checkpoint had it.
    late = torch.tensor([float(trained[EPOCHS, batch]) for batch in range(ledger.BATCHES)]).clamp(max=1)
    now = torch.tensor([float(trained[EPOCHS, batch] > before[EPOCHS, batch]) for batch in range(ledger.BATCHES)])
    assert mode in ("pipe", *DELAYED) or not late.any()
    extra = outcome.applied - EPOCHS
    assert torch.equal(extra, extra[:1].expand_as(extra))
    assert (extra[0] >= now).all()
    assert (extra[0] <= late).all()
    every = [trained[epoch, batch] for epoch in range(EPOCHS) for batch in range(ledger.BATCHES)]
    assert 1 <= min(every) <= max(every) <= 2


@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_holds_every_push_in_all_shards_or_in_none(make: Make, seed: int) -> None:
    """Also where workers give gradients away without waiting for an answer, and shards take long to apply them."""
    slow = dataclasses.replace(ledger.DEVICE, update=Cost("60ms", "0s"))
    draw = random.Random(f"checkpoint {seed}")
    nodes = [draw.choice([1, 1, 2]) for _ in range(draw.randint(2, 3))]
    options = {"batch__accumulate": 2, "server__pull_every": 3, "log__every": "10u", "checkpoint__every": "4u"}
    half = ledger.plain(make(mode="downpour", stop__after="9u", **options))
    outcome = ledger.train(half, nodes, overwrite=True, device=slow)
    for path in Run(outcome.folder).checkpoints():
        applied = checkpoint.load(path).tensors("parameters")["counts"]
        assert torch.equal(applied, applied[:1].expand_as(applied)), "each batch is in all parts of the parameters or in none"
    whole = ledger.plain(make(mode="downpour", stop__after="2e", **options))
    resumed = ledger.train(whole, nodes, outcome.trained, device=slow)
    assert torch.equal(resumed.applied, torch.full_like(resumed.applied, 2))
    assert set(resumed.trained.values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["vanilla", "overlap", "downpour"])
def test_what_a_slow_worker_has_left_is_trained_by_the_others(make: Make, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    def seconds() -> float:
        outcome = ledger.train(config, [1, 1, 1, 1], overwrite=True, stragglers=[Straggler(3, 20)])
        assert torch.equal(outcome.applied, torch.full_like(outcome.applied, 8))
        assert set(outcome.trained.values()) == {1}
        return float(events(outcome.folder, "train")[-1]["seconds"])

    config = ledger.plain(make(mode=mode, stop__after="8e", log__every="5u"))
    shared = seconds()
    monkeypatch.setattr(DataBalancer, "needs_redistribution", lambda its: False)
    assert shared < 0.65 * seconds()


def test_rounds_of_all_workers_do_not_wait_for_one_that_waits_for_them(make: Make) -> None:
    """Not even after a checkpoint, for which they had to hear from it."""
    nodes = [1, 1, 1]
    half = ledger.plain(make(mode="vanilla", stop__after="30u"))
    uneven = ledger.train(half, nodes, overwrite=True, stragglers=[Straggler(1, 5), Straggler(2, 5)])
    whole = ledger.plain(make(mode="backup", server__backup=0, stop__after="3e", checkpoint__every="3u"))
    resumed = ledger.train(whole, nodes, uneven.trained)
    assert resumed.trained == {(epoch, batch): 1 for epoch in range(3) for batch in range(ledger.BATCHES)}


@pytest.mark.parametrize("slow", [0, 3])
def test_a_worker_that_averages_once_at_the_end_waits_there_for_a_slow_one(make: Make, slow: int) -> None:
    config = ledger.plain(make(mode="simuparallel", stop__after="3e"))
    outcome = ledger.train(config, [1, 1, 1, 1], overwrite=True, stragglers=[Straggler(slow, 20)])
    assert "workers exchange only once, at the end" in (outcome.folder / "train.log").read_text(encoding="utf-8")
    assert outcome.trained == {(epoch, batch): 1 for epoch in range(3) for batch in range(ledger.BATCHES)}


@pytest.mark.parametrize("slow", [0, 3])
def test_a_worker_that_has_nothing_left_when_the_run_resumes_still_takes_part_in_the_average(make: Make, slow: int) -> None:
    half = ledger.plain(make(mode="simuparallel", stop__after="250t"))  # three epochs of the fast workers
    outcome = ledger.train(half, [1, 1, 1, 1], overwrite=True, stragglers=[Straggler(slow, 20)])
    assert (3, 2) in outcome.trained
    assert (0, 20 + slow) not in outcome.trained
    resumed = ledger.train(ledger.plain(make(mode="simuparallel", stop__after="3e")), [1, 1, 1, 1], outcome.trained)
    assert {resumed.trained[epoch, batch] for epoch in range(3) for batch in range(ledger.BATCHES)} == {1}


def forgets_what_is_under_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Worker, "settled_position", property(lambda worker: worker.position))


def says_nothing_of_what_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recover.Inventory, "lost", lambda its, moves: 0)


def misplaces_a_part(patch: pytest.MonkeyPatch) -> None:
    part = recover._part
    patch.setattr(recover, "_part", lambda piece, move: part(piece, move).roll(1))


def pays_twice(patch: pytest.MonkeyPatch) -> None:
    state = Overlap.state
    patch.setattr(Overlap, "state", lambda its: dataclasses.replace(state(its), residual=its._payload.clone()))


@pytest.mark.parametrize(
    ("mutant", "mode"),
    [
        (forgets_what_is_under_way, "overlap"),
        (says_nothing_of_what_is_lost, "diloco-async"),
        (misplaces_a_part, "vanilla"),
        (pays_twice, "overlap"),
    ],
)
def test_the_seeds_find_what_is_wrong(
    make: Make, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None], mode: str
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(60):
            check(make, mode, seed, **EXACT[mode])


@pytest.mark.parametrize("mode", ["vanilla", "sparse-overlap", "sync"])
def test_who_goes_on_keeps_nothing_of_what_was_before(make: Make, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    workers: list[tuple[int, weakref.ref[Worker]]] = []  # by the seats of their ranks
    begun = Worker.begun

    def counted(worker: Worker, leader: Any) -> None:
        begun(worker, leader)
        original_rank = worker.transport.original_rank  # type: ignore[attr-defined]
        workers.append((original_rank, weakref.ref(worker)))
        assert sum(its == original_rank and there() is not None for its, there in workers) == 1

    monkeypatch.setattr(Worker, "begun", counted)
    config = ledger.plain(make(mode=mode, stop__after="3e"))
    ledger.train(config, [1, 1, 1, 1], kills=[Kill(1, "0.3s"), Kill(3, "0.7s")])
    assert len(workers) == 4 + 3 + 2


@pytest.mark.parametrize("mode", ["vanilla", "sparse-overlap", "strom", "local-sgd", "easgd"])
def test_model_and_vectors_of_before_are_gone_when_the_next_worker_is_made(
    make: Make, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A device that is full with one worker has no room for two."""
    before: dict[int, list[weakref.ref[Any]]] = defaultdict(list)  # by the seats of their ranks
    made = Worker.__init__

    def counted(worker: Worker, config: Config, transport: Any, model: Any, batches: Any) -> None:
        assert not any(there() is not None for there in before[transport.original_rank])
        made(worker, config, transport, model, batches)
        before[transport.original_rank] += map(weakref.ref, (model, worker.flat.gradient, worker.strategy))

    monkeypatch.setattr(Worker, "__init__", counted)
    config = ledger.plain(make(mode=mode, stop__after="3e"))
    ledger.train(config, [1, 1, 1, 1], kills=[Kill(1, "0.3s"), Kill(3, "0.7s")])
    assert sum(map(len, before.values())) == 3 * (4 + 3 + 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", FEWER)
@pytest.mark.parametrize("mode", OTHERS)
def test_every_batch_is_trained_whoever_ends_in_every_mode(make: Make, mode: str, seed: int) -> None:
    outcome, recoveries = trial(make, mode, seed)
    covered(outcome, recoveries)
    assert torch.isfinite(outcome.applied).all()
    if mode in ("local-sgd", "simuparallel"):  # the mean of what workers did: of at most eight
        assert (outcome.applied >= EPOCHS / 8 - 1e-4).all()


def test_a_residual_is_not_applied_again_if_another_rank_has_completed_an_update_with_it() -> None:
    residual = WorkerState(residual=torch.ones(2))
    state = recover.SurvivorState([0], 0, [], None, 0, 0, {}, None, worker_state=residual, updates=4)  # type: ignore[arg-type]
    assert state.owed(newest=5).residual is not None, "its message left it out"
    state.worker_state, state.in_doubt = WorkerState(), residual
    assert state.owed(newest=4).residual is not None
    assert state.owed(newest=5).residual is None


@pytest.mark.parametrize("newest", [4, 5], ids=["without another's update", "with one"])
def test_what_a_survivor_owes_outlives_a_worker_that_has_loaded_it(newest: int) -> None:
    """A worker clears what it has loaded. Then other ranks may end before all train again, so that it is loaded once more."""
    kept = WorkerState(residual=torch.ones(2), own={"elastic_parameters": torch.ones(2)})
    state = recover.SurvivorState([0], 0, [], None, 0, 0, {}, None, worker_state=kept, updates=4)  # type: ignore[arg-type]
    state.owed(newest).clear()
    again = state.owed(newest)
    assert again.residual is not None
    assert again.own


@pytest.mark.parametrize(
    ("mode", "doubtful"), [("low-bit", True), ("powersgd", True), ("sparse", False), ("sparse-local", False)]
)
def test_which_residuals_an_interrupted_exchange_has_already_sent_is_known(mode: str, doubtful: bool) -> None:
    """A residual that changes when an update is complete is in the message of an exchange that is not."""
    room, chosen = engine([1, 1]), settings(mode, {})

    def owed(transport: VirtualTransport) -> bool:
        kept, perhaps = strategy_of(chosen, FlatModel(Vector()), transport).rescue()
        assert (kept.residual is None) != (perhaps.residual is None) or not doubtful
        return perhaps.residual is not None

    assert together(room, owed, owed) == [doubtful] * 2
