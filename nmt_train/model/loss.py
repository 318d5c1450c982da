"""Cross-entropy with label smoothing that computes logits, their softmax and both gradients block by block.

Only one block of logits exists at a time, and its softmax replaces it. Memory never holds the logits of a whole batch or a
second copy of them, and a block is still in the cache when the gradients are computed from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits per block: 32 MB in fp32, about the last-level cache of a server core complex. A GPU needs larger blocks.
_BLOCK = {"cpu": 1 << 23, "cuda": 1 << 28}
_TINY = 1e-30  # softmax rounds probabilities below about 1e-38 to 0


def block_size(device: str, vocabulary: int) -> int:
    """How many rows of logits a block has on this type of device."""
    return max(1, _BLOCK[device] // vocabulary)


def smoothed_cross_entropy(
    hidden: Tensor,
    output: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float,
    weights: Tensor | None = None,
) -> Tensor:
    """The sum over rows of -(1 - smoothing) log p(label) - smoothing * mean_v log p(v), p = softmax(hidden output^T + bias).

    hidden: (rows, dim); output: (vocabulary, dim); bias: (vocabulary,) or None; labels: (rows,). weights: (rows,), fp32, by
    which each row's term is multiplied, or None. Products run in the dtype of `hidden`; the sum is fp32.
    """
    loss: Tensor = _SmoothedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, output, bias, labels, smoothing, weights
    )
    return loss


class _SmoothedCrossEntropy(torch.autograd.Function):
    """With the smoothed label q, the gradient of the logits is p - q.

    The uniform part of q changes the gradient of every logit by the same amount. Its contribution to the gradients of `hidden`
    and `output` is therefore one vector each, which is subtracted once instead of per logit; to that of `bias`, one number.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, output: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float,
        weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        # Autocast would run the softmax in fp32 and convert every block of logits; this code chooses the dtypes itself.
        with torch.autocast(hidden.device.type, enabled=False):
            total, *gradients = _loss_and_gradients(hidden, output, bias, labels, smoothing, weights, ctx.needs_input_grad[1])
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, output_gradient, bias_gradient = ctx.saved_tensors
        bias_gradient = None if bias_gradient is None else bias_gradient * scale
        output_gradient = None if output_gradient is None else output_gradient * scale
        return hidden_gradient * scale, output_gradient, bias_gradient, None, None, None


def _loss_and_gradients(
    hidden: Tensor,
    output: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float,
    row_weights: Tensor | None,
    trained: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The loss, and its gradients; trained: whether that of `output` is wanted."""
    vocabulary = output.shape[0]
    dtype, weights = hidden.dtype, output.to(hidden.dtype)
    hidden_gradient, output_gradient = torch.empty_like(hidden), torch.zeros_like(output) if trained else None
    bias_gradient = None if bias is None else torch.zeros_like(bias)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    weights_sum = output.sum(0)
    size = block_size(hidden.device.type, vocabulary)
    for start in range(0, len(hidden), size):
        block = hidden[start : start + size]
        label = torch.arange(len(block), device=labels.device), labels[start : start + size]
        logits = block @ weights.T
        if bias is not None:
            logits += bias.to(dtype)
        label_logits = logits[label].float()
        probabilities = torch.softmax(logits, dim=1)
        label_probabilities = probabilities[label].float()
        log_label = _log(label_probabilities, label_logits, logits)
        del logits
        mean_log = block.to(weights_sum.dtype) @ weights_sum / vocabulary - (label_logits - log_label)
        if bias is not None:
            mean_log += bias.mean()
        probabilities[label] = (label_probabilities - (1 - smoothing)).to(dtype)
        if row_weights is not None:
            its = row_weights[start : start + size]
            log_label, mean_log = log_label * its, mean_log * its
            probabilities *= its[:, None].to(dtype)
        total -= (1 - smoothing) * log_label.sum() + smoothing * mean_log.sum()
        torch.mm(probabilities, weights, out=hidden_gradient[start : start + size])
        if output_gradient is not None:
            _accumulate(output_gradient, probabilities, block)
        if bias_gradient is not None:
            bias_gradient += probabilities.sum(0, dtype=torch.float32)
    if smoothing:
        share = smoothing / vocabulary
        if row_weights is None:
            hidden_gradient -= weights_sum * share
            rows = hidden.sum(0, dtype=torch.float32)
        else:
            hidden_gradient -= row_weights[:, None] * weights_sum * share
            rows = (hidden.float() * row_weights[:, None]).sum(0)
        if output_gradient is not None:
            output_gradient -= rows * share
        if bias_gradient is not None:
            bias_gradient -= (len(hidden) if row_weights is None else row_weights.sum()) * share
    return total, hidden_gradient, output_gradient, bias_gradient


def _log(probabilities: Tensor, label_logits: Tensor, logits: Tensor) -> Tensor:
    """The logarithms of the probabilities of the labels (rows,), fp32; logits: (rows, vocabulary).

    Those that softmax has rounded to 0 are computed from the logits. On a GPU, asking whether there are any would make the CPU
    wait for all that the GPU has to do, so there they count as _TINY: this changes the cost that is logged, not the gradient.
    """
    if probabilities.device.type == "cuda":
        return probabilities.clamp_min(_TINY).log()
    if bool((tiny := probabilities < _TINY).any()):
        return torch.where(tiny, label_logits - logits.float().logsumexp(1), probabilities.log())
    return probabilities.log()


def _accumulate(gradient: Tensor, probabilities: Tensor, block: Tensor) -> None:
    if gradient.dtype == block.dtype:
        gradient.addmm_(probabilities.T, block)
    else:
        gradient += (probabilities.T @ block).to(gradient.dtype)


def guided_cross_entropy(log_weights: Tensor, links: Tensor, shares: Tensor) -> Tensor:
    """Return the fp32 sum over links of -share * log(attention weight): the cost of guided alignment (Garg et al. 2019).

    log_weights: (batch, target, source). links: (links,), places in it when flattened. shares: (links,).
    """
    return -(log_weights.flatten().index_select(0, links) * shares).sum()


def cross_entropy(hidden: Tensor, output: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """Return the fp32 sum over rows of -log p(label), without label smoothing or gradients; shapes as above."""
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for logits, block_labels in _blocks(hidden, output, bias, labels):
        total += torch.nn.functional.cross_entropy(logits, block_labels, reduction="sum")
    return total


def log_probabilities(hidden: Tensor, output: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """Return log p(label) of each row (rows,), fp32; shapes as above."""
    parts = [
        -torch.nn.functional.cross_entropy(logits, block_labels, reduction="none")
        for logits, block_labels in _blocks(hidden, output, bias, labels)
    ]
    return torch.cat(parts)


def _blocks(hidden: Tensor, output: Tensor, bias: Tensor | None, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield fp32 logits (rows of the block, vocabulary) with their labels."""
    size = block_size(hidden.device.type, output.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), size):
            logits = hidden[start : start + size].float() @ output.T
            if bias is not None:
                logits += bias
            yield logits, labels[start : start + size]
