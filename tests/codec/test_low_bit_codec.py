"""Matrices of signs and magnitudes of rank one: what they can say exactly, how short they are, and what they leave out."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt_train.codec.compiled_low_bit import CompiledLowBit
from nmt_train.codec.error_feedback import ErrorFeedback
from nmt_train.codec.low_bit import LowBit
from nmt_train.codec.low_bit_for import _try, low_bit_for
from nmt_train.common.errors import NotFinite
from nmt_train.common.message import Malformed, Message

ROUNDING = 2 ** (1 / 16)  # half of an eighth of an octave


KINDS = (CompiledLowBit, LowBit)  # for CPUs, and for other devices
on_all_devices = pytest.mark.parametrize("kind", KINDS)


def low_bit(kind: type[LowBit], shapes: list[tuple[int, int]], values: int) -> LowBit:
    return kind(shapes, values, torch.full((3, sum(rows * columns for rows, columns in shapes)), math.nan))


def decoded(codec: LowBit, vector: torch.Tensor) -> torch.Tensor:
    found = torch.full_like(vector, math.nan)
    codec.decode(codec.encode(vector, 0), found)
    return found


@on_all_devices
@pytest.mark.parametrize("values", [2, 3])
@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e6])
def test_signs_with_magnitudes_of_rank_one_are_said_to_rounding(kind: type[LowBit], values: int, unit: float) -> None:
    torch.manual_seed(1)
    magnitudes = torch.outer(torch.rand(20) + 0.1, 10 ** torch.linspace(-2, 2, 30)) * unit
    matrix = magnitudes * (torch.randint(0, 2, (20, 30)) * 2 - 1)
    vector = torch.cat([matrix.flatten(), torch.randn(7)])
    found = decoded(low_bit(kind, [(20, 30), (1, 7)], values), vector)
    error = (found / vector)[:600].log().abs()
    assert float(error.max()) <= 2 * math.log(ROUNDING) + 1e-5  # of the row and of the column


@on_all_devices
def test_a_matrix_of_one_row_is_its_columns(kind: type[LowBit]) -> None:
    torch.manual_seed(2)
    vector = torch.randn(50)
    found = decoded(low_bit(kind, [(1, 50)], 2), vector)
    assert float((found / vector).log().abs().max()) <= 2 * math.log(ROUNDING) + 1e-5


@on_all_devices
def test_two_values_keep_every_sign_and_three_leave_out_what_is_small(kind: type[LowBit]) -> None:
    torch.manual_seed(3)
    matrix = torch.randn(64, 256)
    two, three = (decoded(low_bit(kind, [(64, 256)], values), matrix.flatten()).view_as(matrix) for values in (2, 3))
    assert torch.equal(two.sign(), matrix.sign())
    magnitude = torch.outer(matrix.abs().mean(1), matrix.abs().mean(0)) / matrix.abs().mean()
    clear = (matrix.abs() / magnitude - 0.77).abs() > 1e-4
    assert torch.equal(three[clear].sign(), (matrix.sign() * (matrix.abs() > 0.77 * magnitude))[clear])
    errors = [float((its - matrix).square().mean()) for its in (two, three)]
    assert errors == pytest.approx([1 - 2 / math.pi, 0.19], rel=0.05)  # those of the best quantizers of normal values


@on_all_devices
@pytest.mark.parametrize(("values", "bits"), [(2, 8), (3, 5)])
def test_a_byte_has_eight_bits_or_five_of_three_values(kind: type[LowBit], values: int, bits: int) -> None:
    codec = low_bit(kind, [(3, 50), (1, 9)], values)
    message = codec.encode(torch.randn(159), 0)
    assert message.bytes == 4 + (3 + 50 + 1 + 9) + -(-159 // bits)
    assert codec.encode_shape(torch.empty(159, device="meta")).bytes == message.bytes


NUMBERS = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, 1e-30, 1e-42, 1e6])


@pytest.mark.slow
@on_all_devices
@pytest.mark.parametrize("values", [2, 3])
@settings(max_examples=100)
@given(numbers=st.lists(NUMBERS, min_size=24, max_size=24))
def test_what_is_left_out_is_never_larger_than_what_was_to_be_sent(
    kind: type[LowBit], values: int, numbers: list[float]
) -> None:
    vector, codec = torch.tensor(numbers), low_bit(kind, [(4, 5), (1, 4)], values)
    left = torch.full_like(vector, math.nan)
    codec.left_out(codec.encode(vector, 0), vector, left)
    assert torch.equal(left, vector - decoded(codec, vector))
    assert float(left.norm()) <= float(vector.norm()) * (1 + 1e-5)


@on_all_devices
@pytest.mark.parametrize("values", [2, 3])
def test_feedback_sends_all_of_a_constant_in_the_end(kind: type[LowBit], values: int) -> None:
    torch.manual_seed(4)
    vector = torch.randn(600) * torch.rand(600)
    feedback, total = ErrorFeedback(low_bit(kind, [(20, 30)], values), torch.zeros(600)), torch.zeros(600)
    for _ in range(200):
        feedback.add(feedback.encode(vector, 0), total)
    assert float((total / 200 - vector).norm()) < 0.05 * float(vector.norm())


@on_all_devices
def test_nothing_is_an_empty_message(kind: type[LowBit]) -> None:
    codec = low_bit(kind, [], 3)
    assert codec.encode(torch.empty(0), 0).bytes == codec.encode_shape(torch.empty(0, device="meta")).bytes == 4
    assert decoded(codec, torch.empty(0)).numel() == 0
    assert not decoded(low_bit(kind, [(2, 3)], 3), torch.zeros(6)).any()


@on_all_devices
@pytest.mark.parametrize("values", [2, 3])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_refused(kind: type[LowBit], values: int, bad: float) -> None:
    vector = torch.randn(12)
    vector[7] = bad
    with pytest.raises(NotFinite):
        low_bit(kind, [(3, 4)], values).encode(vector, 0)


@on_all_devices
def test_a_message_that_does_not_fit_is_refused(kind: type[LowBit]) -> None:
    codec = low_bit(kind, [(3, 4)], 3)
    largest, codes, packed = codec.encode(torch.randn(12), 0).tensors
    for tensors in ((largest, codes[1:], packed), (largest, codes, torch.full_like(packed, 243)), (codes, packed)):
        with pytest.raises(Malformed):
            codec.decode(Message((), tensors), torch.empty(12))


@pytest.mark.parametrize("values", [2, 3])
def test_all_devices_send_the_same_but_for_rounding(values: int) -> None:
    torch.manual_seed(5)
    shapes = [(100, 37), (1, 300), (64, 5)]
    vector = torch.randn(sum(rows * columns for rows, columns in shapes)) * torch.rand(1).square()
    codecs = [low_bit(kind, shapes, values) for kind in KINDS]
    message, other = (codec.encode(vector, 0) for codec in codecs)
    (largest, codes, packed), (other_largest, other_codes, other_packed) = message.tensors, other.tensors
    assert float(largest) == pytest.approx(float(other_largest), rel=1e-5)
    assert int((codes.int() - other_codes.int()).abs().max()) <= 1
    assert float((codes != other_codes).float().mean()) < 0.01
    assert float((packed != other_packed).float().mean()) < (0.01 if values == 3 else 1e-9)
    found = [torch.empty_like(vector) for _ in codecs]
    for codec, into in zip(codecs, found, strict=True):
        codec.decode(message, into)
    assert torch.equal(*found)  # the same message means the same on all of them


def test_a_gpu_on_which_triton_does_not_work_has_operations_of_torch_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nmt_train.codec.gpu_low_bit", None)
    assert low_bit_for.__wrapped__(torch.device("cuda", 0)) is LowBit
    (warning,) = capsys.readouterr().err.splitlines()
    assert f"Triton does not work on host {socket.gethostname()}" in warning
    assert low_bit_for(torch.device("cpu")) is CompiledLowBit


def test_a_class_that_decodes_wrongly_is_not_used() -> None:
    class Wrong(LowBit):
        def decode(self, message: Message, into: torch.Tensor) -> None:
            super().decode(message, into)
            into[4] *= 2

    _try(CompiledLowBit, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="wrong results"):
        _try(Wrong, torch.device("cpu"))


SCRIPT = """
import hashlib
import torch
from nmt_train.codec.compiled_low_bit import CompiledLowBit

torch.manual_seed(0)
for values in (2, 3):
    codec = CompiledLowBit([(300, 77), (1, 500), (41, 130)], values, torch.empty(3, 28930))
    magnitudes = torch.cat([codec._approximated(torch.randn(28930))[0] for _ in range(20)])
    print(hashlib.sha256(magnitudes.numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_new_machine_code_rounds_as_that_on_disk(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": ""}
    first, second = (
        subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert first == second != ""
    assert any(tmp_path.rglob("*.nbc"))


@pytest.mark.parametrize("kind", KINDS)
def test_huge_gradients_are_sent_or_refused_but_not_as_zeros(kind: type[LowBit]) -> None:
    vector = torch.randn(1000 * 1000) * 1e17
    try:
        found = decoded(low_bit(kind, [(1000, 1000)], 2), vector)
    except NotFinite:
        return
    assert float(found.abs().mean()) == pytest.approx(float(vector.abs().mean()), rel=0.01)


@pytest.mark.parametrize("values", [2, 3])
@pytest.mark.parametrize("wrong", [torch.zeros(11), torch.zeros(13), torch.zeros(24)[::2]])
def test_a_vector_that_does_not_fit_is_refused(values: int, wrong: torch.Tensor) -> None:
    """Compiled loops do not check bounds."""
    codec, right = low_bit(CompiledLowBit, [(3, 4)], values), torch.randn(12)
    message = codec.encode(right, 0)
    for work in (
        lambda: codec.encode(wrong, 0),
        lambda: codec.decode(message, wrong),
        lambda: codec.add(message, wrong),
        lambda: codec.left_out(message, right, wrong),
        lambda: codec.split(message, right, wrong),
    ):
        with pytest.raises(RuntimeError):
            work()


@on_all_devices
@pytest.mark.parametrize("values", [2, 3])
def test_a_vector_is_split_into_what_is_sent_and_what_is_left_out(kind: type[LowBit], values: int) -> None:
    torch.manual_seed(6)
    vector, codec = torch.randn(38), low_bit(kind, [(5, 7), (1, 3)], values)
    message, sent, error = codec.encode(vector, 0), vector.clone(), torch.full((38,), math.nan)
    codec.split(message, sent, error, scale=3.0)
    assert torch.equal(sent, decoded(codec, vector))
    torch.testing.assert_close(error, 3 * (vector - sent))
