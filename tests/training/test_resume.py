"""How a run of several ranks resumes: postponed validations, workers that join, other modes and layouts."""

from __future__ import annotations

import dataclasses
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Make
from safetensors.torch import load
from simulated import FAST, LINK, events, parameters, run, words

from nmt_train.model.metrics import TestSets
from nmt_train.run import checkpoint
from nmt_train.simulation.cluster import Kill
from nmt_train.training.background_validation import BackgroundValidation
from nmt_train.training.worker import Worker

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["sync", "vanilla", "sparse-overlap", "easgd"])
def test_a_validation_that_was_put_off_is_made_when_the_run_continues(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(BackgroundValidation, "advance", lambda its, wait=False: False)
        folder = run(make, tmp_path / "run", [1, 1], mode=mode, stop__after="6u", validation__every="6u")
    assert checkpoint.load(folder / "last").facts["validation_pending"]
    run(make, tmp_path / "run", [1, 1], mode=mode, stop__after="2e", validation__every="1000u")
    assert len(events(folder, "validation")) == 2  # that one, and the last
    assert not checkpoint.load(folder / "last").facts["validation_pending"]
    assert words(folder) == words(run(make, tmp_path / "whole", [1, 1], mode=mode, stop__after="2e"))


@pytest.mark.parametrize("mode", ["vanilla", "sparse-overlap", "backup"])
def test_all_workers_continue_if_the_validation_that_should_be_the_last_is_a_new_best(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    values, measure = chain([5.0, 6.0], (4 / n for n in count(1))), TestSets.measure

    def measured(sets: TestSets, *arguments: Any, **options: Any) -> Any:
        found, value = measure(sets, *arguments, **options), next(values)
        return {name: dataclasses.replace(scores, values=dict.fromkeys(scores.values, value)) for name, scores in found.items()}

    monkeypatch.setattr(TestSets, "measure", measured)
    folder = run(make, tmp_path / "run", [1, 1, 1], mode=mode, stop__after="3e", stop__patience=1, validation__every="6u",
                 log__every="50u", batch__tokens=300)  # fmt: skip
    assert [event["cross-entropy"] for event in events(folder, "validation")][:4] == [5.0, 6.0, 4.0, 2.0]
    assert checkpoint.load(folder / "last").facts["progress"]["epochs"] == 3


@pytest.mark.parametrize("at", ["0.5s", "0.9s", "1.3s"])
@pytest.mark.parametrize("mode", ["vanilla", "sync"])
def test_ranks_that_end_while_a_validation_is_under_way_do_not_stop_the_others(
    make: Make, tmp_path: Path, mode: str, at: str
) -> None:
    folder = run(make, tmp_path / "run", [1, 1, 1], mode=mode, stop__after="4e", validation__every="1u",
                 places={**LINK, "kills": [Kill(2, at)]})  # fmt: skip
    assert checkpoint.load(folder / "last").facts["progress"]["epochs"] == 4


@pytest.mark.parametrize("at", ["2.5s", "3.1s", "4.4s"])
@pytest.mark.parametrize("mode", ["vanilla", "sync"])
def test_a_new_rank_0_knows_all_validations_of_the_one_before(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, at: str
) -> None:
    values, measure = chain([5.0, 1.0], repeat(4.0)), TestSets.measure

    def measured(sets: TestSets, *arguments: Any, **options: Any) -> Any:
        found, value = measure(sets, *arguments, **options), next(values)
        return {name: dataclasses.replace(scores, values=dict.fromkeys(scores.values, value)) for name, scores in found.items()}

    monkeypatch.setattr(TestSets, "measure", measured)
    folder = run(make, tmp_path / "run", [1, 1, 1], mode=mode, stop__after="4e", validation__every="2u", log__every="1000u",
                 recovery__every="1000u", checkpoint__every="1000u", places={**LINK, "kills": [Kill(0, at)]})  # fmt: skip
    found = events(folder, "validation")
    assert [event["cross-entropy"] for event in found][:3] == [5.0, 1.0, 4.0]
    assert (folder / "best-cross-entropy").resolve().name == str(found[1]["update"])
    assert len(events(folder, "recovery")) == 1


def test_workers_that_join_begin_with_the_parameters_of_then(make: Make, tmp_path: Path) -> None:
    waves = {1: "0u", 2: "8u", 3: "20u"}
    folder = run(make, tmp_path / "run", [1, 1, 1], mode="vanilla", server__join=waves, stop__after="40u", log__every="1u")
    staleness = [int(age) for event in events(folder, "ranks") for rank in event["ranks"] for age in rank["staleness"]]
    assert max(staleness) < 8


@pytest.mark.parametrize("killed", [3, 0])  # one that waits, and one that trains
def test_workers_still_join_later_after_another_rank_has_ended(make: Make, tmp_path: Path, killed: int) -> None:
    waves = {2: "0u", 4: "20u"}
    folder = run(make, tmp_path / "run", [1] * 4, mode="vanilla", server__join=waves, stop__after="40u", log__every="5u",
                 places={**LINK, "kills": [Kill(killed, "0.4s")]})  # fmt: skip
    recovered = next(event["update"] for event in events(folder, "recovery"))
    assert recovered < 20
    speeds = [[rank["words_per_second"] for rank in event["ranks"]] for event in events(folder, "ranks")]
    assert sum(speed > 0 for speed in speeds[0]) == 2
    assert "3 workers train from now on" in (folder / "train.log").read_text(encoding="utf-8")
    assert sum(speed > 0 for speed in speeds[-1]) == 3


@pytest.mark.parametrize(
    ("mode", "nodes"), [("single", [1]), ("sync", [1, 1]), ("low-bit", [1, 1]), ("powersgd", [1, 1]), ("vanilla", [1, 1])]
)
def test_a_run_with_muon_resumes_bit_for_bit(make: Make, tmp_path: Path, mode: str, nodes: list[int]) -> None:
    settings = {"mode": mode, "optimizer__name": "muon", "checkpoint__every": "6u"}
    whole = run(make, tmp_path / "whole", nodes, stop__after="12u", **settings)
    run(make, tmp_path / "half", nodes, stop__after="6u", **settings)
    resumed = run(make, tmp_path / "half", nodes, stop__after="12u", **settings)
    assert parameters(resumed) == parameters(whole)


@pytest.mark.parametrize("mode", ["sync", "powersgd"])
def test_a_run_with_late_lookups_resumes_bit_for_bit(make: Make, tmp_path: Path, mode: str) -> None:
    settings = {"mode": mode, "replicas__late_lookups": True, "checkpoint__every": "6u"}
    whole = run(make, tmp_path / "whole", [1, 1], stop__after="12u", **settings)
    run(make, tmp_path / "half", [1, 1], stop__after="6u", **settings)
    resumed = run(make, tmp_path / "half", [1, 1], stop__after="12u", **settings)
    assert parameters(resumed) == parameters(whole)


RESUMED: dict[str, tuple[dict[str, Any], list[int], dict[str, Any], list[int]]] = {
    "in a sparse mode": ({"mode": "vanilla"}, [1, 1], {"mode": "sparse"}, [1, 1]),
    "with an elastic force": ({"mode": "vanilla"}, [1, 1], {"mode": "easgd"}, [1, 1]),
    "on other nodes": (
        {"mode": "sparse", "server__per": "node"},
        [2, 2],
        {"mode": "sparse", "server__per": "node"},
        [1] * 4,
    ),
    "with other local steps": ({"mode": "sparse-local", "local__every": 3}, [1, 1], {"mode": "overlap"}, [1, 1]),
    "on fewer ranks": ({"mode": "sparse-overlap"}, [1, 1, 1], {"mode": "sparse-overlap"}, [1, 1]),
    "with more ranks": ({"mode": "sparse"}, [1, 1], {"mode": "sparse"}, [2, 2]),
}


@pytest.mark.parametrize("name", RESUMED)
def test_no_worker_of_a_resumed_run_is_far_from_its_checkpoint(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before, nodes, after, others = RESUMED[name]
    folder = run(make, tmp_path / "run", nodes, stop__after="30u", dropping__up=0.5, **before)
    begun, far = Worker.begun, list[float]()

    def measured(worker: Worker, leader: Any) -> None:
        saved = checkpoint.load(last).tensors("parameters")
        flat = torch.cat([saved[name].flatten() for name, _ in worker.flat.layout])
        client = getattr(worker.strategy, "_client", None)
        received = [getattr(client, name, None) for name in ("_known_to_shards", "_of_node")]
        known = [worker.flat.parameters, *(vector for vector in received if vector is not None)]
        # Where shards have the optimizer, they have applied what workers had not sent.
        unsent = sum(checkpoint.load(last).tensors(f"worker-{rank}").get("unsent", 0.0) for rank in range(len(nodes)))
        far.append(max(min(float((vector - place).norm()) for place in (flat, flat + unsent)) for vector in known))
        begun(worker, leader)

    last = (folder / "last").resolve()
    monkeypatch.setattr(Worker, "begun", measured)
    initial = run(make, tmp_path / "initial", [1], stop__after="1u")
    saved, first = (checkpoint.load(path / "last").tensors("parameters") for path in (folder, initial))
    start = float(sum((saved[name] - first[name]).square().sum() for name in saved) ** 0.5)
    far.clear()
    run(make, tmp_path / "run", others, stop__after="34u", dropping__up=0.5, **after)
    assert len(far) == sum(others)
    assert max(far) < 0.3 * start


@pytest.mark.parametrize("mode", ["vanilla", "backup", "sparse"])
def test_nodes_whose_devices_exchange_together_continue_as_if_uninterrupted(make: Make, tmp_path: Path, mode: str) -> None:
    common = {"mode": mode, "server__per": "node", "checkpoint__every": "6u", "places": FAST}
    whole = run(make, tmp_path / "whole", [2, 2], stop__after="16u", **common)
    run(make, tmp_path / "parts", [2, 2], stop__after="6u", **common)
    parts = run(make, tmp_path / "parts", [2, 2], stop__after="16u", **common)
    assert parameters(parts) == parameters(whole)


@pytest.mark.parametrize("ranks", [[1], [1, 1]])
def test_a_run_in_bf16_continues_bit_for_bit_with_parameters_in_fp32(make: Make, tmp_path: Path, ranks: list[int]) -> None:
    common: dict[str, Any] = {"mode": "sync" if len(ranks) > 1 else "single", "precision": "bf16", "validation__every": "3u"}
    whole = parameters(run(make, tmp_path / "whole", ranks, stop__after="12u", **common))
    for end in ("5u", "12u"):
        cut = parameters(run(make, tmp_path / "cut", ranks, stop__after=end, **common))
    assert whole == cut
    tensors = load(whole).values()
    assert all(tensor.dtype == torch.float32 for tensor in tensors)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in tensors)
