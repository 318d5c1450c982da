"""Four or eight bits per element: how large an error can be, how short messages are, and what is not sent."""

from __future__ import annotations

import math

import pytest
import torch

from nmt_train.codec.levels import EIGHT_BITS, FOUR_BITS, Levels
from nmt_train.common.errors import NotFinite
from nmt_train.common.message import Malformed, Message

SHAPES = [(5, 9), (1, 4), (3, 1)]  # 52 elements in 9 rows
both = pytest.mark.parametrize("values", [FOUR_BITS, EIGHT_BITS])


def codec(values: int, shapes: list[tuple[int, int]] = SHAPES) -> Levels:
    return Levels(shapes, values, torch.empty(0))


def vector() -> torch.Tensor:
    torch.manual_seed(1)
    rows = torch.repeat_interleave(10 ** torch.linspace(-20, 5, 9), torch.tensor([9] * 5 + [4] + [1] * 3))
    return torch.randn(52) * rows


def decoded(values: int, of: torch.Tensor, shapes: list[tuple[int, int]] = SHAPES) -> torch.Tensor:
    found = torch.full_like(of, math.nan)
    codec(values, shapes).decode(codec(values, shapes).encode(of, 0), found)
    return found


@both
def test_no_element_is_off_by_more_than_half_a_step_of_its_row(values: int) -> None:
    given, start = vector(), 0
    found = decoded(values, given)
    for rows, columns in SHAPES:
        place = slice(start, start := start + rows * columns)
        matrix, its = given[place].view(rows, columns), found[place].view(rows, columns)
        step = matrix.abs().amax(1, keepdim=True) / (values // 2)
        assert bool(((matrix - its).abs() <= step * 0.5001).all())


@both
def test_multiples_of_a_step_are_exact(values: int) -> None:
    most = values // 2
    levels = torch.arange(-most, most + 1.0)
    assert torch.equal(decoded(values, levels / 8, [(1, values)]), levels / 8)


@both
@pytest.mark.parametrize("elements", [0, 1, 2, 7])
def test_odd_and_even_lengths_come_back(values: int, elements: int) -> None:
    given = torch.arange(1.0, elements + 1)
    shapes = [(elements, 1)] if elements else []
    torch.testing.assert_close(decoded(values, given, shapes), given)


def test_a_message_has_four_or_eight_bits_per_element_and_a_number_per_row() -> None:
    assert codec(FOUR_BITS).encode(vector(), 0).bytes == 52 // 2 + 4 * 9
    assert codec(EIGHT_BITS).encode(vector(), 0).bytes == 52 + 4 * 9


@both
def test_a_shape_is_encoded_as_long_as_values(values: int) -> None:
    assert codec(values).encode_shape(vector().to("meta")).bytes == codec(values).encode(vector(), 0).bytes


@both
def test_zeros_stay_zeros(values: int) -> None:
    assert torch.equal(decoded(values, torch.zeros(52)), torch.zeros(52))


@both
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_sent(values: int, value: float) -> None:
    given = vector()
    given[17] = value
    with pytest.raises(NotFinite):
        codec(values).encode(given, 0)


@both
def test_a_message_of_another_length_is_refused(values: int) -> None:
    message = codec(values).encode(vector(), 0)
    with pytest.raises(Malformed):
        codec(values).decode(Message((), (message.tensors[0], message.tensors[1][:-1])), vector())
