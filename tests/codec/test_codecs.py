"""What every codec must keep: nothing is lost under feedback, rates are kept, odd vectors do no harm."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from codecs_to_test import CODECS, ROUNDED
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt_train.codec import tile_topk
from nmt_train.codec.codec import Codec
from nmt_train.codec.config import DroppingConfig, ThresholdConfig, TileConfig
from nmt_train.codec.dense import BFloat16, Dense
from nmt_train.codec.error_feedback import ErrorFeedback
from nmt_train.codec.half import Half
from nmt_train.codec.int8 import Int8
from nmt_train.codec.selection import LargestOfRows, Sample, reaching
from nmt_train.codec.strom_threshold import GRAIN, StromThreshold
from nmt_train.codec.tile_topk import TileTopK
from nmt_train.codec.topk import TopK, pack_gaps, unpack_gaps
from nmt_train.common.errors import NotFinite
from nmt_train.common.message import Message
from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.optimizer import Optimizer
from nmt_train.server.shard import Shard
from nmt_train.strategy.update_rules import Asynchronous

SGD = OptimizerConfig(name="sgd", learning_rate=1.0, schedule="constant", warmup=0)

NUMBERS = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, 1e-30, 1e-42, 65504.0, 1e6])
VECTORS = st.lists(NUMBERS, max_size=400) | st.builds(lambda x, n: [x] * n, NUMBERS, st.integers(0, 2000))


def both(codec: Codec, vector: torch.Tensor, update: int) -> tuple[torch.Tensor, int]:
    message = codec.encode(vector, update)
    decoded = torch.full_like(vector, math.nan)
    codec.decode(message, decoded)
    return decoded, message.bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=60)
@given(rounds=st.lists(VECTORS, min_size=1, max_size=3), update=st.integers(0, 20))
def test_decoded_plus_residual_is_the_input_and_what_was_owed(name: str, rounds: list[list[float]], update: int) -> None:
    size = len(rounds[0])
    feedback = ErrorFeedback(CODECS[name](), torch.zeros(size))
    for values in rounds:
        vector = torch.tensor((values * (size // max(1, len(values)) + 1))[:size] if values else [0.0] * size)
        owed = feedback.residual + vector
        decoded, _ = both(feedback, vector, update)
        assert torch.equal(decoded + feedback.residual, owed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDED)
@settings(max_examples=60)
@given(rounds=st.lists(VECTORS, min_size=1, max_size=3))
def test_decoded_plus_residual_is_so_to_rounding(name: str, rounds: list[list[float]]) -> None:
    size = len(rounds[0])
    feedback = ErrorFeedback(ROUNDED[name](), torch.zeros(size))
    for values in rounds:
        vector = torch.tensor((values * (size // max(1, len(values)) + 1))[:size] if values else [0.0] * size)
        owed = feedback.residual + vector
        decoded, _ = both(feedback, vector, 0)
        largest = max(float(part.abs().max()) for part in (owed, decoded)) if size else 0.0
        torch.testing.assert_close(decoded + feedback.residual, owed, rtol=0, atol=2**-22 * largest)


@pytest.mark.parametrize("name", ["half", "bf16", "top-k", "top-k, with a part in full", "int8", "threshold, by density"])
def test_a_message_is_as_long_as_it_says_it_would_be(name: str) -> None:
    torch.manual_seed(3)
    vector = torch.randn(200_000) * torch.rand(200_000)
    codec = (CODECS | ROUNDED)[name]()
    expected = codec.encode_shape(torch.empty(200_000, device="meta")).bytes
    assert expected == pytest.approx(codec.encode(vector, 1000).bytes, rel=0.1)


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_refused_by_all(name: str, bad: float) -> None:
    vector = torch.randn(700)
    vector[600] = bad
    with pytest.raises(NotFinite):
        ROUNDED[name]().encode(vector, 0)


def test_int8_errs_by_half_a_level_of_the_largest() -> None:
    vector = torch.randn(1000)
    decoded, size = both(Int8(), vector, 0)
    assert size == 1000 + 4
    assert float((decoded - vector).abs().max()) <= 0.51 * float(vector.abs().max()) / 127


def test_a_threshold_sends_signs_of_what_reaches_it_and_keeps_what_is_over() -> None:
    feedback = ErrorFeedback(StromThreshold(ThresholdConfig(tau=1.0, coding="words")), torch.zeros(4))
    decoded, size = both(feedback, torch.tensor([2.5, -1.0, 0.75, -0.25]), 0)
    assert decoded.tolist() == [1.0, -1.0, 0.0, 0.0]
    assert size == 4 + 2 * 4
    assert feedback.residual.tolist() == [1.5, 0.0, 0.75, -0.25]


def test_thresholds_are_whole_numbers_of_grains_so_that_sums_do_not_depend_on_their_order() -> None:
    for tau in (1e-9, 1e-4, 0.3, 7.7, None):
        message = StromThreshold(ThresholdConfig(tau=tau, density=0.2)).encode(torch.randn(50), 0)
        grains = float(message.tensors[0].double()) / GRAIN
        assert grains == round(grains) >= 1


@settings(max_examples=60)
@given(vector=VECTORS, dropped=st.floats(0.5, 0.999), sample=st.sampled_from([100, 10_000]))
def test_never_much_more_than_the_target_is_sent(vector: list[float], dropped: float, sample: int) -> None:
    codec = TopK(DroppingConfig(), dropped, sample)
    target = codec.target(len(vector))
    decoded, _ = both(codec, torch.tensor(vector), 0)
    if target <= len(vector) // 2:
        assert int((decoded != 0).sum()) <= math.floor(target * 1.5)


def test_exactly_the_largest_are_sent_where_the_vector_is_small() -> None:
    vector = torch.randn(1000)
    decoded, _ = both(TopK(DroppingConfig(values="fp32"), 0.99), vector, 0)
    expected = torch.zeros(1000)
    places = vector.abs().topk(10).indices
    expected[places] = vector[places]
    assert torch.equal(decoded, expected)


def test_about_the_target_is_sent_where_the_threshold_is_estimated() -> None:
    torch.manual_seed(0)
    vector = torch.randn(300_000) * torch.rand(300_000)
    decoded, size = both(TopK(DroppingConfig(), 0.99), vector, 0)
    sent = int((decoded != 0).sum())
    assert 0.7 * 3000 < sent < 1.5 * 3000
    assert size < 3.2 * sent + 100, "two bytes for a value, hardly more than one for its position"
    left = vector.abs()[decoded == 0].max()
    assert left <= decoded[decoded != 0].abs().min() * 1.001, "whatever stays is smaller than whatever goes"


def test_every_element_is_looked_at_in_time() -> None:
    """A stride that never changes would be blind for what lies between (a bug of the first implementation)."""
    seen = torch.zeros(100_003, dtype=torch.bool)
    for update in range(500):
        seen[Sample(1000).places(100_003, update)] = True
    assert seen.float().mean() > 0.95


@pytest.mark.parametrize("name", CODECS)
def test_a_message_depends_on_the_vector_and_the_update_alone_so_that_a_resumed_run_sends_the_same(name: str) -> None:
    one, other, vectors = CODECS[name](), CODECS[name](), torch.randn(3, 5000)
    for update, vector in enumerate(vectors[:2]):
        one.encode(vector.clone(), update)
        torch.rand(update + 1)  # drawn by another thread
    found, again = (its.encode(vectors[2].clone(), 2) for its in (one, other))
    assert all(torch.equal(a, b) for a, b in zip(found.tensors, again.tensors, strict=True))


@pytest.mark.parametrize("vector", [torch.zeros(50_000), torch.cat([torch.zeros(49_990), torch.ones(10)])])
def test_a_threshold_of_zero_sends_no_zeros(vector: torch.Tensor) -> None:
    decoded, size = both(TopK(DroppingConfig(), 0.99), vector, 0)
    assert torch.equal(decoded, vector)
    assert size < 300


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("size", [20, 50_000])
def test_what_is_not_finite_is_refused_and_the_residual_is_unharmed(bad: float, size: int) -> None:
    for dropped in (0.1, 0.9):  # dense, sparse
        codec = ErrorFeedback(TopK(DroppingConfig(), dropped), torch.ones(size))
        vector = torch.randn(size)
        vector[size // 3] = bad
        with pytest.raises(NotFinite):
            codec.encode(vector, 0)
        assert torch.equal(codec.residual, torch.ones(size))


@pytest.mark.parametrize("apart", [1, 4, 8])  # updates between two messages of a worker: one, or one of each worker
@pytest.mark.parametrize("parts", [100, 103, 200])
def test_with_a_part_in_full_in_every_message_no_element_waits_for_ever(parts: int, apart: int) -> None:
    config = DroppingConfig(flush=parts, values="fp32")
    codec = ErrorFeedback(TopK(config, 0.999), torch.randn(30_000))
    nothing, longest = torch.zeros(30_000), 0
    while codec.residual.count_nonzero():
        codec.encode(nothing, longest * apart)
        longest += 1
    assert longest <= {100: 101, 103: 103, 200: 211}[parts]


@settings(max_examples=100)
@given(st.sets(st.integers(0, 100_000), max_size=300))
def test_gaps_tell_positions(places: set[int]) -> None:
    positions = torch.tensor(sorted(places), dtype=torch.int64)
    packed = pack_gaps(positions)
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack_gaps(packed), positions)


def test_selection_by_threshold_is_that_of_plain_comparison() -> None:
    vector = torch.randn(2_500_000)
    positions, values = reaching(vector, 2.0)
    assert torch.equal(positions, (vector.abs() >= torch.tensor(2.0)).nonzero().flatten())
    assert torch.equal(values, vector[positions])


DEFAULTS = {  # of the configuration
    "half": lambda: Half(),
    "bf16": lambda: BFloat16(),
    "int8": lambda: Int8(),
    "threshold": lambda: StromThreshold(ThresholdConfig()),
    "top-k": lambda: TopK(DroppingConfig(), 0.99),
}


def draws(tails: str, count: int, elements: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    for _ in range(count):
        normal = torch.randn(elements, generator=generator)
        # Student's t with three degrees of freedom: of 1,000 elements some are twenty times as large as most.
        chi = torch.randn(3, elements, generator=generator).square().mean(0).sqrt()
        yield normal if tails == "gaussian" else normal / chi


@pytest.mark.slow
@pytest.mark.parametrize("tails", ["gaussian", "heavy"])
@pytest.mark.parametrize("name", DEFAULTS)
def test_what_a_worker_owes_stays_bounded_at_the_default_settings(name: str, tails: str) -> None:
    elements, largest = 4000, []
    owed, sums, decoded_sums = (
        ErrorFeedback(DEFAULTS[name](), torch.zeros(elements)),
        torch.zeros(elements),
        torch.zeros(elements),
    )
    for round_, vector in enumerate(draws(tails, 1000, elements)):
        decoded, _ = both(owed, vector, round_)
        sums, decoded_sums = sums + vector, decoded_sums + decoded
        largest.append(float((sums - decoded_sums).norm() / vector.norm()))
    assert max(largest[500:]) < 1.5 * max(largest[100:500])
    assert max(largest) < 20


@pytest.mark.slow
@pytest.mark.parametrize("tails", ["gaussian", "heavy"])
@pytest.mark.parametrize("name", DEFAULTS)
def test_what_a_shard_owes_a_worker_stays_bounded_at_the_default_settings(name: str, tails: str) -> None:
    elements, largest = 4000, []
    made = Shard(Optimizer(SGD, torch.zeros(elements)), Dense(), DEFAULTS[name](), Asynchronous(1))
    made.pull(0)
    for vector in draws(tails, 1000, elements):
        made.push(0, Message((), (vector,)))
        made.answer(0)
        largest.append(float((made.optimizer.parameters - made._held[0]).norm() / vector.norm()))
    assert max(largest[500:]) < 1.5 * max(largest[100:500])
    assert max(largest) < 20


@pytest.mark.parametrize("size", [1e-12, 1e-8, 1.0, 1e5, 1e30])
def test_half_precision_is_of_the_largest_element_not_of_one(size: float) -> None:
    vector = size * torch.randn(5000, generator=torch.Generator().manual_seed(1))
    decoded, bytes_ = both(Half(), vector, 0)
    assert bytes_ == 2 * 5000
    assert float(((decoded - vector).abs() / vector.abs()).max()) < 2**-10


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 40), st.lists(st.sampled_from([0.0, 0.01, 1.0, 30.0]), min_size=1, max_size=4))
def test_the_largest_of_rows_are_those_of_a_stable_sort_whatever_came_before(seed: int, keep: int, scales: list[float]) -> None:
    """Also if many elements are equal, and if vectors become larger or smaller from call to call."""
    generator = torch.Generator().manual_seed(seed)
    largest = LargestOfRows(keep)
    for scale in scales:
        rows = (torch.randn(5, 1000, generator=generator) * 3).round() * scale
        rows[1] = torch.randn(1000, generator=generator)
        rows[2, 30:] = 0
        columns = rows.abs().argsort(dim=1, descending=True, stable=True)[:, :keep].sort(1).values
        positions, values = largest.find(rows)
        assert torch.equal(positions, (columns + 1000 * torch.arange(5)[:, None]).flatten())
        assert torch.equal(values, rows.gather(1, columns).flatten())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_largest_of_rows_include_none_that_is_not_finite(bad: float) -> None:
    rows, largest = torch.randn(5, 1000), LargestOfRows(20)
    largest.find(rows)
    rows[3, 77] = bad
    with pytest.raises(NotFinite):
        largest.find(rows)


def test_the_operations_for_other_devices_find_what_the_compiled_loops_find(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = torch.randn(10_000)
    codec = TileTopK(TileConfig(keep=64))
    compiled_message = codec.encode(vector, 0)
    monkeypatch.setattr(LargestOfRows, "_on_cpu", LargestOfRows._with_torch)
    monkeypatch.setattr(tile_topk, "_bins", tile_topk._bins_with_torch)
    for mine, other in zip(compiled_message.tensors, codec.encode(vector, 0).tensors, strict=True):
        torch.testing.assert_close(mine, other)


ENCODE_WITH_ALL = """
import torch
from codecs_to_test import CODECS, ROUNDED
from nmt_train.codec.compiled_low_bit import CompiledLowBit

vector = torch.randn(10_000)
low_bit = [CompiledLowBit([(100, 90), (1, 1000)], values, torch.empty(3, 10_000)) for values in (2, 3)]
for codec in (*(make() for make in (CODECS | ROUNDED).values()), *low_bit):
    message = codec.encode(vector.clone(), 1)
    for scale in (1, -1.0):
        codec.add(message, torch.zeros(10_000), scale)
        codec.split(message, vector.clone(), torch.zeros(10_000), scale)
    codec.left_out(message, vector, torch.zeros(10_000))
"""


@pytest.mark.slow
def test_compiled_functions_are_called_with_the_same_types_only(tmp_path: Path) -> None:
    """Otherwise processes that compile at the same time could mix up on disk what they compile for different types."""
    helpers = str(Path(__file__).parents[1] / "helpers")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": "", "PYTHONPATH": helpers}
    subprocess.run([sys.executable, "-c", ENCODE_WITH_ALL], env=environment, check=True)
    numbers = [path.name.split(".")[-2] for path in tmp_path.rglob("*.nbc")]  # NAME.1.nbc: for the first types
    assert len(numbers) > 10
    assert set(numbers) == {"1"}
