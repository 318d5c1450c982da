"""Codes of whole numbers: what goes in comes out, and as short as the codes that they are named after."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt_train.codec import integer_coding as bits

WHOLE = st.lists(st.integers(0, 5000), max_size=200)


def array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@given(values=WHOLE)
def test_a_fixed_width_holds_what_fits(values: list[int]) -> None:
    assert bits.from_fixed(bits.fixed(array(values), 13), len(values), 13).tolist() == values


@given(values=st.lists(st.integers(0, 40), max_size=200), max_in_flight=st.binary(max_size=3))
def test_unary_ends_where_it_says(values: list[int], max_in_flight: bytes) -> None:
    packed = bits.unary(array(values))
    found, used = bits.from_unary(np.concatenate([packed, np.frombuffer(max_in_flight, np.uint8)]), len(values))
    assert found.tolist() == values
    assert used == len(packed) == -(-sum(value + 1 for value in values) // 8)


@given(values=WHOLE, width=st.integers(0, 12))
def test_rice_codes_come_back_and_take_the_quotient_a_bit_and_the_rest(values: list[int], width: int) -> None:
    packed = bits.rice(array(values), width)
    assert bits.from_rice(packed, len(values), width).tolist() == values
    assert 8 * len(packed) <= sum((value >> width) + 1 + width for value in values) + 7 * (width + 1)


@pytest.mark.parametrize("density", [0.3, 0.05, 1 / 846, 1e-4])
def test_rice_codes_of_gaps_are_near_what_entropy_allows(density: float) -> None:
    gaps = np.random.default_rng(1).geometric(density, 20_000).astype(np.int64) - 1
    entropy = -(density * math.log2(density) + (1 - density) * math.log2(1 - density)) / density
    each = 8 * len(bits.rice(gaps, bits.rice_width(density))) / len(gaps)
    assert entropy * 0.97 < each < entropy + 0.12


def test_the_width_for_no_elements_or_all_of_them_is_none() -> None:
    assert [bits.rice_width(density) for density in (0.0, 0.9, 1.0)] == [0, 0, 0]
