from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nmt_train.model import loss as loss_module
from nmt_train.model.loss import cross_entropy, smoothed_cross_entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("block", [1, 25, 70, 1 << 20])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_all_gradients_equal_torchs_in_blocks_of_any_size(
    monkeypatch: pytest.MonkeyPatch, smoothing: float, block: int, biased: bool, weighted: bool
) -> None:
    monkeypatch.setitem(loss_module._BLOCK, "cpu", block)
    torch.manual_seed(0)
    hidden = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    output = torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(20, dtype=torch.float64, requires_grad=True) if biased else None
    inputs = [hidden, output] if bias is None else [hidden, output, bias]
    labels = torch.randint(0, 20, (13,))
    weights = torch.tensor([0.0, 2.5, *torch.rand(11)], dtype=torch.float64) if weighted else None
    rows = F.cross_entropy(F.linear(hidden, output, bias), labels, label_smoothing=smoothing, reduction="none")
    expected = (rows if weights is None else rows * weights).sum()
    wanted = torch.autograd.grad(3 * expected, inputs)
    actual = smoothed_cross_entropy(hidden, output, bias, labels, smoothing, weights)
    found = torch.autograd.grad(3 * actual, inputs)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_label_smoothing_is_the_mixture_that_the_docstring_says() -> None:
    torch.manual_seed(0)
    hidden, output, labels = torch.randn(4, 6), torch.randn(9, 6), torch.tensor([0, 8, 3, 3])
    logs = torch.log_softmax(hidden @ output.T, dim=1)
    by_hand = sum(-0.9 * float(row[label]) - 0.1 * float(row.mean()) for row, label in zip(logs, labels, strict=True))
    assert float(smoothed_cross_entropy(hidden, output, None, labels, 0.1)) == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cost_of_a_diverging_model_has_no_limit(dtype: torch.dtype) -> None:
    """Where the softmax rounds the probability of a label to 0."""
    hidden, labels = torch.tensor([[1.0, 0.0]]), torch.tensor([1])
    for logit in (80.0, 100.0, 200.0, 1024.0):
        output = torch.tensor([[logit, 0.0], [0.0, 0.0]])
        expected = F.cross_entropy(hidden @ output.T, labels, label_smoothing=0.1)
        torch.testing.assert_close(
            smoothed_cross_entropy(hidden.to(dtype), output, None, labels, 0.1), expected, rtol=1e-2, atol=0
        )


def test_validations_cross_entropy_is_torchs_even_under_autocast() -> None:
    torch.manual_seed(0)
    hidden, output, labels = torch.randn(11, 6), torch.randn(20, 6), torch.randint(0, 20, (11,))
    for bias in (None, output[:, 0]):
        expected = F.cross_entropy(F.linear(hidden, output, bias), labels, reduction="sum")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(cross_entropy(hidden, output, bias, labels), expected)


def test_only_one_block_of_logits_exists_at_a_time() -> None:
    rows, vocabulary = 512, 4096
    hidden, output = torch.randn(rows, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    labels = torch.randint(0, vocabulary, (rows,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loss_module._BLOCK, "cpu", 16 * vocabulary)
        with torch.profiler.profile(profile_memory=True) as profile:
            smoothed_cross_entropy(hidden, output, None, labels, 0.1).backward()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    one_copy = rows * vocabulary * 4
    assert 0 < peak < one_copy / 2
