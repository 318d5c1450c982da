"""A pipeline applies every gradient a fixed number of steps late, on all workers alike."""

from __future__ import annotations

import pytest
import torch
from pulled import RATE, START, target, trained

MIDDLE = (target(0) + target(1)) / 2  # the mean gradient of two ranks pulls there


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_at_each_step_the_gradients_of_so_many_steps_before_are_in(width: int) -> None:
    found = trained("pipe", [1, 1], 12, {"pipeline.width": width, "replicas.codec": "dense"})
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    seen: list[torch.Tensor] = []
    for step in range(12):
        applied = sum((its - MIDDLE for its in seen[: max(0, step - width + 1)]), torch.zeros(5))
        seen.append(START - RATE * applied)
    for step, (expected, its) in enumerate(zip(seen, found[0], strict=False)):
        torch.testing.assert_close(its, expected, rtol=0, atol=1e-5, msg=f"before step {step}")
    torch.testing.assert_close(found[0][-1], START - RATE * sum(its - MIDDLE for its in seen), rtol=0, atol=1e-5)


def test_a_pipeline_of_width_one_is_sync_bit_for_bit() -> None:
    pipe = trained("pipe", [1, 2], 6, {"pipeline.width": 1, "replicas.codec": "dense"})
    assert all(torch.equal(one, other) for one, other in zip(pipe[0], trained("sync", [1, 2], 6)[0], strict=True))


def test_the_first_updates_are_those_of_sync() -> None:
    pipe = trained("pipe", [1, 1], 8, {"pipeline.width": 3, "pipeline.warmup": 4, "replicas.codec": "dense"})[0]
    sync = trained("sync", [1, 1], 8)[0]
    assert [torch.equal(one, other) for one, other in zip(pipe, sync, strict=True)] == [True] * 5 + [False] * 4
    assert torch.equal(pipe[5], pipe[4])  # the pipeline fills


@pytest.mark.parametrize("codec", ["half", "bf16"])
def test_what_travels_in_fewer_bits_arrives_the_same_everywhere(codec: str) -> None:
    found = trained("pipe", [2, 1], 10, {"replicas.codec": codec})
    assert all(torch.equal(its[-1], found[0][-1]) for its in found)
    exact = trained("pipe", [2, 1], 10, {"replicas.codec": "dense"})[0][-1]
    torch.testing.assert_close(found[0][-1], exact, rtol=0, atol=0.02 if codec == "half" else 0.1)
