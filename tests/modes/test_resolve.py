"""The table of modes: what a row becomes on a number of ranks, and what follows from the number of workers."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Make

from nmt_train.common.errors import UserError
from nmt_train.config import Config
from nmt_train.modes import resolve as modes
from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.learning_rate import for_async_workers
from nmt_train.strategy.plan import AlonePlan, ServerPlan


@pytest.mark.parametrize(
    ("mode", "nodes", "per", "workers", "optimizer"),
    [
        ("single", (0, 0), "device", 2, "shard"),
        ("vanilla", (0, 0, 1), "device", 3, "shard"),
        ("overlap", (0, 0, 1), "node", 2, "shard"),
        ("sparse", (0,), "device", 1, "shard"),
        ("sparse", (0, 0, 1), "device", 3, "worker"),
        ("sparse-overlap", (0, 0), "node", 1, "worker"),
    ],
)
def test_a_row_on_ranks(make: Make, mode: str, nodes: tuple[int, ...], per: str, workers: int, optimizer: str) -> None:
    config = make(mode=mode, server__per=per)
    assert (modes.resolve(config, nodes).workers, served(config, nodes).sends_updates) == (workers, optimizer == "worker")


def served(config: Config, nodes: tuple[int, ...]) -> ServerPlan:
    family = modes.resolve(config, nodes).family
    assert isinstance(family, ServerPlan)
    return family


def test_one_rank_of_mode_single_is_alone(make: Make) -> None:
    assert modes.resolve(make(mode="single"), (0,)).family == AlonePlan()


def test_what_is_asked_for_replaces_what_the_row_has(make: Make) -> None:
    assert served(make(mode="vanilla", server__up="half"), (0, 1)).up == "half"


def test_what_a_row_for_one_machine_becomes_on_its_devices_is_refused_as_in_any_mode(make: Make) -> None:
    changes = {"server__rule": "rounds", "server__one_channel_per_node": True}
    for mode, nodes in (("vanilla", (0, 1)), ("single", (0, 0))):
        with pytest.raises(UserError, match=r"server.one_channel_per_node: .* but a round waits for all; remove it"):
            modes.resolve(make(mode=mode, **changes), nodes)


@pytest.mark.parametrize("mode", ["downpour", "easgd"])
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"server__per": "node"}, "server.per: node lets"),
        ({"server__one_node_at_a_time": True}, "server.one_node_at_a_time: a worker waits"),
        ({"server__rule": "rounds"}, "server.rule: with rounds, a worker waits"),
    ],
)
def test_what_needs_an_answer_to_every_push_is_refused_where_pushes_have_none(
    make: Make, mode: str, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=f"{sentence}.* but mode {mode} sends and receives separately; "):
        modes.resolve(make(mode=mode, **changes), (0, 1))


@pytest.mark.parametrize("changes", [{"mode": "pipe"}, {"mode": "local-sgd"}])
def test_buckets_where_parts_cannot_travel_apart_are_refused(make: Make, changes: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"replicas.buckets: only the modes sync, powersgd, low-bit send .*; remove it"):
        modes.resolve(make(replicas__buckets=4, **changes))
    assert [modes.resolve(make(**its)).family.buckets for its in (changes, {"mode": "sync"})] == [1, 8]
    with pytest.raises(UserError, match=r"replicas.late_lookups: mode .* does not send gradients in parts; remove it"):
        modes.resolve(make(replicas__late_lookups=True, **changes))


def test_late_lookups_with_dense_updates_are_refused(make: Make) -> None:
    with pytest.raises(UserError, match=r"replicas.late_lookups: .* low_rank.dense_updates"):
        modes.resolve(make(mode="powersgd", replicas__late_lookups=True, low_rank__dense_updates=5))


def test_muon_whose_directions_come_from_owners_needs_means(make: Make) -> None:
    for mode in ("low-bit", "sync"):
        with pytest.raises(UserError, match=r"batch.reduction: .*muon"):
            modes.resolve(make(mode=mode, optimizer__name="muon", batch__reduction="sum"))


def test_deltas_let_through_what_is_news_to_a_worker(make: Make) -> None:
    found = [served(make(mode="sparse"), tuple(range(ranks))).dropped_down for ranks in (1, 2, 3, 8, 101, 501)]
    assert found == pytest.approx([0.99, 0.99, 0.98, 0.93, 0.0, 0.0])
    assert served(make(mode="sparse", dropping__down=0.5), tuple(range(8))).dropped_down == 0.5


def test_momentum_gives_way_to_that_of_asynchrony() -> None:
    config = OptimizerConfig(beta1=0.9)
    assert for_async_workers(1, config).beta1 == 0.9
    assert [for_async_workers(workers, config).beta1 for workers in (2, 4, 8, 100)] == pytest.approx([0.4, 0.15, 0.025, 0.0])
    given = OptimizerConfig(beta1=0.9, async_beta1=0.7)
    assert [for_async_workers(workers, given).beta1 for workers in (1, 2)] == [0.9, 0.7]


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "easgd"}, {"mode": "pipe"}, {"mode": "powersgd"}, {"mode": "local-sgd"}, {"mode": "backup"},
        {"mode": "softsync", "server__bundle": 4}, {"mode": "vanilla", "server__bundle": 4},
    ],
)  # fmt: skip
def test_workers_whose_updates_are_averaged_keep_momentum_and_warm_up(make: Make, changes: dict[str, Any]) -> None:
    config = make(optimizer__beta1=0.9, optimizer__warmup=100, **changes)
    optimizer = modes.resolve(config, (0, 1, 2, 3)).optimizer
    assert (optimizer.beta1, optimizer.warmup) == (0.9, 100)


@pytest.mark.parametrize(
    ("changes", "warmup"),
    [
        ({"mode": "sparse"}, 252),
        ({"mode": "sparse", "server__bundle": 4}, 252),  # a bundle of finished updates is their sum
        ({"mode": "sparse-local-async"}, 63),
        ({"mode": "local-sgd", "local__outer": "sum"}, 63),
    ],
)
def test_workers_whose_updates_are_added_up_have_less_momentum_and_a_longer_warm_up(
    make: Make, changes: dict[str, Any], warmup: int
) -> None:
    """Four workers: 4^(2/3) times as many updates, which each worker makes a quarter of where it counts its own."""
    config = make(optimizer__beta1=0.9, optimizer__warmup=100, **changes)
    optimizer = modes.resolve(config, (0, 1, 2, 3)).optimizer
    assert (optimizer.beta1, optimizer.warmup) == (pytest.approx(0.15), warmup)


def test_a_cosine_lasts_as_long_as_training_unless_it_is_given(make: Make) -> None:
    config = make(optimizer__schedule="cosine", stop__after=["1h", "2Mt"])
    assert str(modes.resolve(config).optimizer.cosine_until) == "2Mt"
    assert modes.resolve(config, (0,)).reasons["optimizer.cosine_until"] == "2Mt (stop.after)"
    config = make(optimizer__schedule="cosine", optimizer__cosine_until="3e")
    assert str(modes.resolve(config).optimizer.cosine_until) == "3e"


@pytest.mark.parametrize("changes", [{"stop__after": "1h"}, {"optimizer__cosine_until": "1h"}])
def test_a_cosine_over_time_is_refused(make: Make, changes: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"optimizer.cosine_until must be a number of epochs, tokens or updates, not a time"):
        make(optimizer__schedule="cosine", **changes)


def test_many_workers_warm_up_for_longer() -> None:
    config = OptimizerConfig(warmup=400)
    assert [for_async_workers(workers, config).warmup for workers in (1, 2, 8)] == [400, 635, 1600]
    given = OptimizerConfig(warmup=400, async_warmup=500)
    assert [for_async_workers(workers, given).warmup for workers in (1, 2)] == [400, 500]


def test_the_rules_for_asynchronous_workers_can_be_switched_off() -> None:
    given = OptimizerConfig(beta1=0.9, warmup=400, async_beta1="unchanged", async_warmup="unchanged")
    adapted = for_async_workers(8, given)
    assert (adapted.beta1, adapted.warmup) == (0.9, 400)


@pytest.mark.parametrize("mode", ["thesis-sparse", "thesis-sparse-overlap"])
def test_the_thesis_s_own_modes_have_none_of_our_rules(make: Make, mode: str) -> None:
    config = make(mode=mode)
    now = modes.resolve(config, (0, 1))
    server = served(config, (0, 1))
    assert not server.sends_updates
    assert (now.dropped_up, server.dropped_down) == (0.999, 0.999)
    assert (now.optimizer.beta1, now.optimizer.warmup) == (config.optimizer.beta1, config.optimizer.warmup)
    assert server.overlap.local_update == "none" or mode == "thesis-sparse"
    assert server.one_node_at_a_time is True


@pytest.mark.parametrize(
    ("changes", "bundle"),
    [
        ({"mode": "softsync"}, 2), ({"mode": "softsync", "server__bundle": 1}, 1),
        ({"mode": "overlap", "server__rule": "softsync"}, 2), ({"mode": "softsync", "server__rule": "async"}, 1),
    ],
)  # fmt: skip
def test_softsync_bundles_two_pushes_in_every_mode(make: Make, changes: dict[str, Any], bundle: int) -> None:
    assert served(make(**changes), (0, 1)).bundle == bundle


def test_workers_whose_pushes_are_bundled_count_as_one(make: Make) -> None:
    config = make(mode="vanilla", server__bundle=2, optimizer__warmup=100, optimizer__beta1=0.9)
    optimizer = modes.resolve(config, (0, 1, 2)).optimizer
    assert (optimizer.beta1, optimizer.warmup) == (0.9, 100)


@pytest.mark.parametrize(
    ("mode", "changes", "keeps"),
    [
        ("sparse", {}, True), ("sparse", {"server__up": "dense"}, False), ("sparse", {"server__bundle": 2}, False),
        ("vanilla", {}, False), ("diloco-async", {}, True), ("diloco-async", {"server__down": "top-k"}, False),
    ],
)  # fmt: skip
def test_a_worker_keeps_its_own_updates_where_they_are_applied_in_full(
    make: Make, mode: str, changes: dict[str, Any], keeps: bool
) -> None:
    """With diloco-async, only what is dropped could be applied in part for good: the rest is in the next delta."""
    assert served(make(mode=mode, **changes), (0, 1)).keeps_own is keeps
