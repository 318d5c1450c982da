"""Muon over the flat vector: against torch's Muon and Adam over separate tensors, and against singular value decompositions."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from nmt_train.model import ModelConfig
from nmt_train.model.transformer import Transformer
from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.flat_model import FlatModel
from nmt_train.optim.muon import Matrix, muon_cost, orthogonalized
from nmt_train.optim.optimizer import Optimizer

RATE, MOMENTUM = 0.01, 0.9
SHAPES = [(7,), (6, 4), (6, 4), (3,), (4, 6), (5, 5), (2,)]


def config(**changes: object) -> OptimizerConfig:
    values = {
        "name": "muon",
        "learning_rate": RATE,
        "schedule": "constant",
        "warmup": 0,
        "momentum": MOMENTUM,
        "weight_decay": 0.0,
    }
    return OptimizerConfig(**{**values, **changes})  # type: ignore[arg-type]


def laid_out() -> tuple[list[slice], list[Matrix]]:
    """The places of SHAPES in a flat vector, and the matrices among them."""
    places, matrices, start = [], [], 0
    for shape in SHAPES:
        size = torch.Size(shape).numel()
        places.append(slice(start, start + size))
        if len(shape) == 2:
            matrices.append(Matrix(start, *shape))
        start += size
    return places, matrices


def gradients(steps: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(laid_out()[0][-1].stop, generator=generator) for _ in range(steps)]


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_matrices_move_as_under_torchs_muon_and_the_rest_as_under_adam(decay: float) -> None:
    places, matrices = laid_out()
    start = torch.linspace(-1, 1, places[-1].stop)
    flat = start.clone()
    ours = Optimizer(config(weight_decay=decay), flat, matrices)
    parts = [nn.Parameter(start[place].clone().view(shape)) for place, shape in zip(places, SHAPES, strict=True)]
    theirs = [
        torch.optim.Muon(
            [part for part in parts if part.dim() == 2], lr=RATE, momentum=MOMENTUM, weight_decay=decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.Adam([part for part in parts if part.dim() == 1], lr=RATE, betas=(0.9, 0.98)),
    ]  # fmt: skip
    for gradient in gradients():
        for part, place in zip(parts, places, strict=True):
            part.grad = gradient[place].view(part.shape).clone()
        for optimizer in theirs:
            optimizer.step()
        ours.apply(gradient.clone())
    for part, place in zip(parts, places, strict=True):
        tolerance = {"rtol": 0.0, "atol": 6 * 0.05 * RATE} if part.dim() == 2 else {}  # torch's iterations are in bf16
        torch.testing.assert_close(flat[place].view(part.shape), part.detach(), **tolerance)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 4, 16), (2, 16, 4)])
def test_orthogonalized_matrices_keep_their_singular_vectors_and_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    inner = left.mT @ orthogonalized(matrices) @ right.mT  # diagonal, if the singular vectors are the same
    diagonal = inner.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(inner, torch.diag_embed(diagonal), rtol=0, atol=1e-4)
    assert diagonal.min() > 0.6
    assert diagonal.max() < 1.25


def test_a_matrix_without_a_gradient_does_not_move() -> None:
    assert torch.equal(orthogonalized(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_an_update_of_a_matrix_has_a_fifth_of_the_learning_rate_as_its_root_mean_square() -> None:
    for rows, columns in ((64, 64), (64, 256), (256, 64)):
        flat = torch.zeros(rows * columns)
        Optimizer(config(), flat, [Matrix(0, rows, columns)]).apply(
            torch.randn(flat.shape, generator=torch.Generator().manual_seed(2))
        )
        assert float(flat.square().mean().sqrt()) == pytest.approx(0.2 * RATE, rel=0.25)


def test_without_matrices_it_is_adam() -> None:
    start, moved = torch.linspace(-1, 1, 10), []
    for name in ("muon", "adam"):
        flat = start.clone()
        optimizer = Optimizer(config(name=name), flat)
        for gradient in gradients():
            optimizer.apply(gradient[:10].clone())
        moved.append(flat)
    assert torch.equal(*moved)


def test_a_loaded_optimizer_continues_exactly() -> None:
    places, matrices = laid_out()
    start, steps = torch.linspace(-1, 1, places[-1].stop), gradients()
    whole, half = start.clone(), start.clone()
    first, second = Optimizer(config(), whole, matrices), Optimizer(config(), half, matrices)
    for gradient in steps:
        first.apply(gradient.clone())
    for gradient in steps[:3]:
        second.apply(gradient.clone())
    continued = half.clone()
    third = Optimizer(config(), continued, matrices)
    third.load(*second.state(), "here")
    for gradient in steps[3:]:
        third.apply(gradient.clone())
    assert torch.equal(continued, whole)


def test_the_matrices_of_a_model_are_those_of_its_layers_and_joined_projections_are_separate() -> None:
    flat = FlatModel(
        Transformer(ModelConfig(preset="tiny", encoder_layers=1, decoder_layers=1, dim=8, ffn_dim=12, heads=2), 20)
    )
    matrices = flat.matrices()
    shapes = [(matrix.rows, matrix.columns) for matrix in matrices]
    encoder, cross = [(8, 8)] * 4, [(8, 8)] * 4
    assert sorted(shapes) == sorted([*encoder, (12, 8), (8, 12), *encoder, *cross, (12, 8), (8, 12)])
    weights = {name: parameter for name, parameter in flat.model.named_parameters() if name.endswith("query_key_value.weight")}
    for parameter in weights.values():
        for projection in parameter.detach().chunk(3):
            assert any(torch.equal(matrix.of(flat.parameters), projection) for matrix in matrices if matrix.rows == 8)
    assert all(one.stop <= other.start for one, other in itertools.pairwise(matrices))


def test_an_update_costs_what_its_iterations_take_and_without_matrices_as_much_as_with_adam() -> None:
    assert muon_cost(1000, []) == 1000
    assert muon_cost(0, [Matrix(0, 64, 64)]) * 8 == pytest.approx(muon_cost(0, [Matrix(0, 128, 128)]), rel=0.01)
    assert muon_cost(0, [Matrix(0, 64, 256)]) == muon_cost(0, [Matrix(0, 256, 64)])
