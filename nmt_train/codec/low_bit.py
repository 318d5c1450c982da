"""Matrices of signs: two or three values per element, whose magnitudes are products of one number per row and one per column.

Zheng et al. 2019 send signs and one magnitude per block. Here, the magnitudes of a matrix are an approximation of rank one of
its absolute values, as Adafactor (Shazeer & Stern 2018) approximates squares: gradients of embeddings differ by row, those of
other matrices also by column.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nmt_train.codec.codec import Codec
from nmt_train.codec.finite import finite
from nmt_train.codec.packing import DIGITS, SIGNS, pack_digits, pack_signs, unpack_digits, unpack_signs
from nmt_train.common.message import Message

# Elements below this part of their approximate magnitude become 0 if there are three values. For normally distributed elements,
# 0.77 of the mean magnitude has the smallest squared error.
THRESHOLD = 0.77
_TINY = torch.finfo(torch.float32).tiny
_STEP, _ZERO = 1 / 8, 255  # the unit of a magnitude's logarithm to base 2; the code of those too small for a byte
_MOST = 3**DIGITS - 1  # the largest byte of three values


class LowBit(Codec):
    """A message holds the magnitudes of rows and columns, and the packed signs: 1 or 1.6 bits per element.

    A magnitude takes a byte: how many eighths of an octave it is below the largest one. Unlike other codecs, this one knows the
    shapes of what it encodes, so exchange low-bit makes its codecs itself.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], values: int, scratch: Tensor) -> None:
        """shapes: (rows, columns) of the matrices that a vector consists of. values: per element, 2 (-1, 1) or 3 (-1, 0, 1).

        scratch: (3, elements of a vector or more), overwritten; codecs that are not used at the same time can share it.
        """
        self._shapes, self._only_signs = shapes, values == 2
        self._elements = sum(rows * columns for rows, columns in shapes)
        self._numbers = sum(rows + columns for rows, columns in shapes)
        self._scratch = scratch[:, : self._elements]

    def encode(self, vector: Tensor, update: int) -> Message:
        magnitudes, packed = self._approximated(vector)
        largest, codes = _logarithms(magnitudes)
        return Message((), (largest, codes, packed))

    def _approximated(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The magnitudes of rows and columns (numbers,), and the packed signs."""
        parts, magnitudes = map(self._matrices, self._scratch), []  # fresh memory would take longer than the computation
        for matrix, found, product, digits in zip(self._matrices(vector), *parts, strict=True):
            torch.abs(matrix, out=found)
            rows, columns = found.mean(1), found.mean(0)
            root = rows.mean().sqrt_().clamp_min_(_TINY)  # rows and columns of similar size need the smallest range
            rows, columns = rows.div_(root), columns.div_(root)
            if self._only_signs:
                scale, size = torch.dot(rows, found @ columns), torch.dot(rows, rows) * torch.dot(columns, columns)
            else:
                torch.outer(rows, columns, out=product)
                torch.mul(product, THRESHOLD, out=digits)
                torch.ge(found, digits, out=digits)  # in floating point: a comparison that returns bool takes longer
                sent = product.mul_(digits).view(-1)
                scale, size = torch.dot(found.view(-1), sent), torch.dot(sent, sent)
                digits.copysign_(matrix)
            magnitudes += [rows.mul_(scale / size.clamp_min(_TINY)), columns]  # the scale with the smallest squared error
        packed = pack_signs(vector) if self._only_signs else pack_digits(self._scratch[2])
        return torch.cat([vector.new_empty(0), *magnitudes]), packed

    def encode_shape(self, vector: Tensor) -> Message:
        codes, packed = (vector.new_empty(length, dtype=torch.uint8) for length in (self._numbers, self._bytes))
        return Message((), (vector.new_empty(1), codes, packed))

    def decode(self, message: Message, into: Tensor) -> None:
        into.copy_(self._signs(message))
        for matrix, rows, columns in self._with_magnitudes(message, into):
            matrix.mul_(rows[:, None]).mul_(columns)

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        decoded = self._scratch[0]
        self.decode(message, decoded)
        into.add_(decoded, alpha=scale)

    def left_out(self, message: Message, vector: Tensor, into: Tensor) -> None:
        if self._only_signs:  # those of `vector`
            for matrix, rows, columns in self._with_magnitudes(message, into):
                torch.outer(rows, columns, out=matrix)
            into.copysign_(vector)
        else:
            self.decode(message, into)
        torch.sub(vector, into, out=into)

    def _signs(self, message: Message) -> Tensor:
        """-1, 0 or 1 for each element, as int8."""
        return (unpack_signs if self._only_signs else unpack_digits)(self._packed(message), self._elements)

    def _packed(self, message: Message) -> Tensor:
        """The packed signs (bytes,), all of them possible."""
        packed = self._parts(message)[2]
        if not self._only_signs and self._elements and (most := int(packed.max())) > _MOST:
            raise message.malformed(f"a byte is {most}, but should be at most {_MOST}")
        return packed

    def _magnitudes_in(self, message: Message) -> Tensor:
        largest, codes, _ = self._parts(message)
        return largest * powers(codes.device)[codes.long()]

    def _with_magnitudes(self, message: Message, vector: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The matrices of `vector`, with the magnitudes of their rows and columns."""
        magnitudes = self._magnitudes_in(message).to(vector)
        numbers = iter(magnitudes.split([length for shape in self._shapes for length in shape]))
        return zip(self._matrices(vector), numbers, numbers, strict=True)

    def _parts(self, message: Message) -> Sequence[Tensor]:
        return message.vectors((torch.float32, 1), (torch.uint8, self._numbers), (torch.uint8, self._bytes))

    def _matrices(self, vector: Tensor) -> list[Tensor]:
        parts = vector.split([rows * columns for rows, columns in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    @property
    def _bytes(self) -> int:
        return -(-self._elements // (SIGNS if self._only_signs else DIGITS))


def _logarithms(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitude (1,), and the code of each. Raises NotFinite if one is infinite or not a number."""
    largest = magnitudes.max().reshape(1) if len(magnitudes) else magnitudes.new_zeros(1)
    finite(largest)
    codes = torch.log2(magnitudes / largest.clamp_min(_TINY)).div_(-_STEP).round_()
    return largest, codes.clamp_(max=_ZERO).to(torch.uint8)


@functools.cache
def powers(device: torch.device) -> Tensor:
    """What each code multiplies the largest magnitude with: a table, so that all devices decode the same bits."""
    powers = torch.exp2(torch.arange(_ZERO + 1, dtype=torch.float64) * -_STEP)
    powers[_ZERO] = 0
    return powers.to(device, torch.float32)
