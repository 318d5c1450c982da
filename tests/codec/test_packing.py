"""Signs and digits in bytes: the same bytes with numpy and with torch, from which the same comes back."""

from __future__ import annotations

import pytest
import torch

from nmt_train.codec import packing


@pytest.fixture(params=["numpy", "torch"], autouse=True)
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With which library the bytes are made: numpy, as on a CPU, or torch, as on a GPU."""
    if request.param == "torch":
        monkeypatch.setattr(packing, "_NUMPY", ())


def test_the_first_sign_is_the_highest_bit() -> None:
    vector = torch.tensor([-1.0, 2.0, -0.0, 0.0, 3.0, -4.0, 5.0, -6.0, -7.0])
    assert packing.pack_signs(vector).tolist() == [0b10100101, 0b10000000]


def test_digits_of_a_byte_are_as_far_apart_as_there_are_bytes() -> None:
    packed = packing.pack_digits(torch.tensor([-1.0, 1.0, 0.0, 1.0, -1.0, -1.0, 1.0]))  # 0 2 1 2 0 0 2, then padding
    assert packed.tolist() == [0 * 81 + 1 * 27 + 0 * 9 + 2 * 3 + 1, 2 * 81 + 2 * 27 + 0 * 9 + 1 * 3 + 1]


@pytest.mark.parametrize("elements", [0, 1, 7, 8, 9, 40, 1003])
def test_what_was_packed_comes_back(elements: int) -> None:
    torch.manual_seed(elements)
    digits = torch.randint(-1, 2, (elements,)).float()
    signs = torch.randint(0, 2, (elements,)) * 2.0 - 1
    packed = packing.pack_digits(digits)
    assert len(packed) == -(-elements // packing.DIGITS)
    assert torch.equal(packing.unpack_digits(packed, elements).float(), digits)
    packed = packing.pack_signs(signs * torch.rand(elements))
    assert len(packed) == -(-elements // packing.SIGNS)
    assert torch.equal(packing.unpack_signs(packed, elements).float(), signs)
