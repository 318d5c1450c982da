"""How much memory a rank needs, and how large a checkpoint is, from the sizes of the vectors alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from nmt_train.config import Config
from nmt_train.corpus.batch import Batch
from nmt_train.model.loss import block_size
from nmt_train.model.transformer import Transformer
from nmt_train.simulation.cluster import ClusterConfig, LinkConfig
from nmt_train.simulation.timing import Shapes, measure

_LINK = LinkConfig(bandwidth=1e9)  # any: only sizes count


class Needs(NamedTuple):
    """Bytes. vectors: of the rank that has the most; checkpoint: of all ranks together."""

    vectors: float
    checkpoint: float


class _WithoutValues(Transformer):
    def _initialize(self) -> None:
        """Leave the values as they are: nothing depends on them."""


def of_vectors(config: Config, nodes: Sequence[int], shapes: Shapes) -> Needs:
    """What a mode keeps: parameters, gradients, optimizer states, residuals, buffers. nodes: the node of each rank."""
    cluster = ClusterConfig(nodes=list(Counter(nodes).values()), network=_LINK, inside=_LINK)
    ranks = measure(config, cluster, shapes, [config.batch.tokens], steps=1).ranks
    return Needs(max(rank.memory for rank in ranks), sum(rank.state for rank in ranks))


def of_batch(config: Config, pieces: int | Sequence[int], batch: Batch) -> float:
    """Bytes of what a step keeps for the backward pass of a batch, and of the output layer's logits and gradients.

    pieces: as in `Transformer`. Nothing is computed: tensors have sizes and no values.
    """
    kept: dict[int, tuple[object, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage._cdata, (storage, storage.nbytes()))
        return tensor

    with FakeTensorMode() as mode:
        model = _WithoutValues(config.model, pieces).train()
        if config.precision == "bf16":
            for parameter in model.compute_layers_in(torch.bfloat16):
                parameter.data = parameter.data.bfloat16()
        source, target = mode.from_tensor(batch.source), mode.from_tensor(batch.target_in)
        mask = None if batch.source_mask is None else mode.from_tensor(batch.source_mask)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = model.states(source, mask, target)
        own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    vocabulary = model.output_matrix.shape[0]
    logits = min(batch.target_tokens, block_size("cpu", vocabulary)) * vocabulary
    output = hidden.numel() + 2 * logits
    return sum(size for key, (_, size) in kept.items() if key not in own) + (
        output * hidden.element_size() + 4 * vocabulary * config.model.dim
    )
