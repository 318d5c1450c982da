"""What a GPU computes is what the CPU computes, to rounding. Needs a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from nmt_train import device
from nmt_train.codec.codec import Codec
from nmt_train.codec.config import DroppingConfig, ThresholdConfig
from nmt_train.codec.dense import BFloat16, Dense
from nmt_train.codec.error_feedback import ErrorFeedback
from nmt_train.codec.half import Half
from nmt_train.codec.int8 import Int8
from nmt_train.codec.low_bit import LowBit
from nmt_train.codec.low_bit_for import low_bit_for
from nmt_train.codec.strom_threshold import StromThreshold
from nmt_train.codec.topk import TopK
from nmt_train.common.errors import NotFinite
from nmt_train.common.message import Message
from nmt_train.corpus.batch import assemble
from nmt_train.model import ModelConfig
from nmt_train.model.beam_search import SearchConfig, search
from nmt_train.model.transformer import Transformer
from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.flat_model import FlatModel
from nmt_train.optim.optimizer import Optimizer
from nmt_train.optim.torch_optimizers import OPTIMIZERS
from nmt_train.transport.local import LocalTransport
from nmt_train.transport.mpi.framing import contents, on_host

pytestmark = pytest.mark.gpu
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
CODECS: dict[str, Callable[[], Codec]] = {
    "dense": Dense, "half": lambda: Half(), "bf16": lambda: BFloat16(), "int8": Int8,
    "threshold": lambda: StromThreshold(ThresholdConfig()),
    "words": lambda: StromThreshold(ThresholdConfig(coding="words")), "top-k": lambda: TopK(DroppingConfig(), 0.99),
    "int32": lambda: TopK(DroppingConfig(indices="int32", values="fp32"), 0.99),
}  # fmt: skip


def vector(elements: int = 30_000) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(3))


def model(own: torch.device, dropout: float = 0.0) -> Transformer:
    torch.manual_seed(1)
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "dim": 64, "ffn_dim": 128, "heads": 4}
    return Transformer(ModelConfig(**sizes, dropout=dropout), 90).to(own)  # type: ignore[arg-type]


def sentences(seed: int, *lengths: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(4, 90, size=length) for length in lengths]


def loss_and_gradient(own: torch.device, precision: str) -> tuple[float, Tensor]:
    trained = model(own)
    flat, batch = FlatModel(trained, precision), assemble(sentences(1, 9, 4, 12), sentences(2, 7, 11, 3))
    loss = flat.loss(batch.to(own))
    flat.backward(loss)
    return float(loss.detach()), flat.gradient.cpu()


@pytest.mark.parametrize("name", CODECS)
def test_a_message_made_on_either_device_means_the_same_on_either(name: str) -> None:
    meant = []
    for maker in (CPU, GPU):
        message = CODECS[name]().encode(vector().to(maker), 0)
        for reader in (CPU, GPU):
            into = torch.empty(30_000, device=reader)
            CODECS[name]().decode(message.on(reader) if reader != CPU else _on_the_cpu(message), into)
            meant.append(into.cpu())
    for its in meant[1:]:
        torch.testing.assert_close(its, meant[0], rtol=1e-3, atol=1e-5)


def _on_the_cpu(message: Message) -> Message:
    return Message(message.numbers, tuple(map(on_host, message.tensors)))


@pytest.mark.parametrize("name", CODECS)
def test_what_a_message_leaves_out_on_a_gpu_is_owed(name: str) -> None:
    codec = ErrorFeedback(CODECS[name](), torch.zeros(30_000, device=GPU))
    into = torch.empty(30_000, device=GPU)
    codec.decode(codec.encode(vector().to(GPU), 0), into)
    torch.testing.assert_close((into + codec.residual).cpu(), vector(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("values", [2, 3])
def test_signs_and_magnitudes_mean_the_same_on_either_device(values: int) -> None:
    meant, left = [], []
    for maker in (CPU, GPU):
        codec = {own: LowBit([(100, 256), (1, 4400)], values, torch.empty(3, 30_000, device=own)) for own in (CPU, GPU)}
        message, rest = codec[maker].encode(vector().to(maker), 0), torch.empty(30_000, device=maker)
        codec[maker].left_out(message, vector().to(maker), rest)
        left.append(rest.cpu())
        for reader in (CPU, GPU):
            into = torch.empty(30_000, device=reader)
            codec[reader].decode(message.on(reader) if reader != CPU else _on_the_cpu(message), into)
            meant.append(into.cpu())
        torch.testing.assert_close(meant[-1] + left[-1], vector(), rtol=1e-5, atol=1e-5)
    for its in meant[1:]:  # a magnitude at the border of two codes may have another code
        assert float((its - meant[0]).norm() / meant[0].norm()) < 0.01


@pytest.mark.parametrize("values", [2, 3])
def test_kernels_and_operations_of_torch_mean_the_same(values: int) -> None:
    if (kind := low_bit_for(GPU)) is LowBit:
        pytest.skip("Triton does not work here")
    shapes = [(100, 256), (1, 4400), (70, 1), (5000, 512), (3, 1501)]
    elements = sum(rows * columns for rows, columns in shapes)
    for start in (0, 1):  # a slice of a vector may begin anywhere
        flat = vector(elements + 1).to(GPU)[start : start + elements]
        flat[:256], flat[256:512] = 0, flat[256:512] * 1e-7  # rows with the largest codes of magnitudes
        ours, theirs = (its(shapes, values, torch.empty(3, elements, device=GPU)) for its in (kind, LowBit))
        message, other = ours.encode(flat, 0), theirs.encode(flat, 0)
        for own, its in zip(message.tensors[1:], other.tensors[1:], strict=True):
            assert float((own != its).float().mean()) < 0.01  # borders of codes
        found = []
        for codec in (ours, theirs):
            put, added, left, sent, rest = (
                flat.new_full((elements,), number) for number in (math.nan, 1, math.nan, 0, math.nan)
            )
            codec.decode(message, put)
            codec.add(message, added, scale=0.25)
            codec.left_out(message, flat, left)
            codec.split(message, sent.copy_(flat), rest, scale=4.0)
            found.append([put, added, left, sent, rest])
        for own, its in zip(*found, strict=True):
            torch.testing.assert_close(own, its, rtol=1e-6, atol=1e-6)
        assert torch.equal(found[0][0], found[1][0])  # all ranks must decode the same mean
        assert torch.equal(ours.encode(flat, 0).tensors[2], message.tensors[2])
    bad = flat.clone()
    bad[7] = math.nan
    with pytest.raises(NotFinite):
        ours.encode(bad, 0)
    with pytest.raises(RuntimeError):
        ours.encode(flat[:-1], 0)


def test_gradients_are_the_same_each_time_also_of_long_sentences() -> None:
    device.prepare("cuda", 0)
    trained = model(GPU, dropout=0.1).train()
    flat, batch, found = FlatModel(trained), assemble(sentences(1, 900, 870), sentences(2, 880, 900)).to(GPU), []
    for _ in range(3):
        flat.gradient.zero_()
        torch.manual_seed(5)
        trained.loss(batch).backward()
        found.append(flat.gradient.clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_attention_prepares_no_plan_for_each_new_shape() -> None:
    device.prepare("cuda", 0)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loss_and_gradient_are_those_of_the_cpu(precision: str) -> None:
    """bf16 has 8 bits of mantissa."""
    (ours, gradient), (theirs, other) = (loss_and_gradient(own, precision) for own in (GPU, CPU))
    close = 1e-4 if precision == "fp32" else 3e-2
    assert ours == pytest.approx(theirs, rel=close)
    assert float((gradient - other).norm() / other.norm()) < 3 * close


def test_search_finds_what_it_finds_on_the_cpu() -> None:
    source = assemble(sentences(3, 9, 4, 12, 6), sentences(4, 2, 2, 2, 2))
    found = []
    for own in (GPU, CPU):
        on_it = source.to(own)
        found.append(search(model(own).eval(), on_it.source, on_it.source_mask, SearchConfig(beam=4)))
    for ours, theirs in zip(*found, strict=True):
        assert ours[0].ids == theirs[0].ids
        assert [its.score for its in ours] == pytest.approx([its.score for its in theirs], rel=1e-3)


@pytest.mark.parametrize("elements", [0, 1, 1000])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_optimizer_goes_on_from_what_it_was_on_the_other_device(name: str, elements: int) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.01, warmup=1)  # type: ignore[arg-type]
    before, after = (Optimizer(config, vector(elements).to(own)) for own in (CPU, GPU))
    before.apply(vector(elements))
    vectors, numbers = before.state()
    after.parameters.copy_(before.parameters)
    after.load(vectors, numbers, "here")
    for optimizer in (before, after):
        optimizer.apply(vector(elements).to(optimizer.parameters.device))
    torch.testing.assert_close(after.parameters.cpu(), before.parameters, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("elements", [0, 5, 3_000_000])
def test_what_leaves_a_gpu_is_there_when_it_is_sent(elements: int) -> None:
    doubled = vector(elements).to(GPU) * 2  # may still be computed
    (sent,) = contents(Message((), (on_host(doubled),)))
    assert sent.tobytes() == (vector(elements) * 2).numpy().tobytes()


def test_random_numbers_of_a_gpu_go_on_where_they_were() -> None:
    states = device.random(GPU)
    assert {state.device for state in states.values()} == {CPU}
    first = torch.rand(9, device=GPU)
    device.set_random(GPU, states)
    assert torch.equal(torch.rand(9, device=GPU), first)


def test_tasks_of_a_rank_are_on_its_gpu() -> None:
    last = torch.cuda.device_count() - 1
    torch.cuda.set_device(last)
    try:
        found: list[int] = []
        LocalTransport().spawn("task", lambda: found.append(torch.cuda.current_device())).result()
        assert found == [last]
    finally:
        torch.cuda.set_device(0)
