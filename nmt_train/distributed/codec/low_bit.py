"""Matrices of signs: two or three values per element, whose magnitudes are products of one number per row and one per column.

Zheng et al. 2019 send signs and one magnitude per block. Here, the magnitudes of a matrix are an approximation of rank one of
its absolute values, as Adafactor (Shazeer & Stern 2018) approximates squares: gradients of embeddings differ by row, those of
other matrices also by column.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nmt_train.distributed.codec.codec import Codec
from nmt_train.distributed.codec.finite import finite
from nmt_train.distributed.message import Message

_PER_BYTE = {2: 8, 3: 5}  # digits of this base that fit in a byte
# Elements below this part of their approximate magnitude become 0 if there are three values. For normally distributed elements,
# 0.77 of the mean magnitude has the smallest squared error.
_THRESHOLD = 0.77
_TINY = torch.finfo(torch.float32).tiny
_STEP, _ZERO = 1 / 8, 255  # the unit of a magnitude's logarithm to base 2; the code of those too small for a byte


class LowBit(Codec):
    """A message holds the magnitudes of rows and columns, and the packed signs: 1 or 1.6 bits per element.

    A magnitude takes a byte: how many eighths of an octave it is below the largest one. Unlike other codecs, this one knows the
    shapes of what it encodes, so exchange low-bit makes its codecs itself.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], values: int) -> None:
        """shapes: (rows, columns) of the matrices that a vector consists of. values: per element, 2 (-1, 1) or 3 (-1, 0, 1)."""
        self._shapes, self._base, self._digits = shapes, values, _PER_BYTE[values]
        self._elements = sum(rows * columns for rows, columns in shapes)
        self._magnitudes = sum(rows + columns for rows, columns in shapes)

    def encode(self, vector: Tensor, update: int) -> Message:
        # In floating point: a comparison that returns bool takes four times as long, and so does a multiplication by it.
        digits = vector.new_zeros(self._bytes * self._digits)
        positive = torch.ge(vector, 0, out=digits[: self._elements])
        magnitudes = []
        for matrix, signs in zip(self._matrices(vector), self._matrices(positive), strict=True):
            found = matrix.abs()
            rows, columns = found.mean(1), found.mean(0)
            root = rows.mean().sqrt_().clamp_min_(_TINY)  # rows and columns of similar size need the smallest range
            rows, columns = rows.div_(root), columns.div_(root)
            if self._base == 3:
                product = torch.outer(rows, columns)
                sent = product * _THRESHOLD
                torch.ge(found, sent, out=sent)
                signs.mul_(2).sub_(1).mul_(sent).add_(1)
                product = product.mul_(sent).flatten()
                scale, size = torch.dot(found.flatten(), product), torch.dot(product, product)
            else:
                scale, size = torch.dot(rows, found @ columns), torch.dot(rows, rows) * torch.dot(columns, columns)
            magnitudes += [rows.mul_(scale / size.clamp_min(_TINY)), columns]  # the scale with the smallest squared error
        largest, codes = _logarithms(torch.cat([vector.new_empty(0), *magnitudes]))
        return Message((), (largest, codes, self._pack(digits)))

    def encode_shape(self, vector: Tensor) -> Message:
        codes, packed = (vector.new_empty(length, dtype=torch.uint8) for length in (self._magnitudes, self._bytes))
        return Message((), (vector.new_empty(1), codes, packed))

    def decode(self, message: Message, into: Tensor) -> None:
        largest, codes, packed = message.vectors(
            (torch.float32, 1), (torch.uint8, self._magnitudes), (torch.uint8, self._bytes)
        )
        self._unpack(packed, message, into)
        magnitudes = torch.where(codes == _ZERO, 0, largest * torch.exp2(codes * -_STEP))
        numbers = iter(magnitudes.to(into).split([length for shape in self._shapes for length in shape]))
        for matrix in self._matrices(into):
            matrix.mul_(next(numbers)[:, None]).mul_(next(numbers))

    def _matrices(self, vector: Tensor) -> list[Tensor]:
        parts = vector.split([rows * columns for rows, columns in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    @property
    def _bytes(self) -> int:
        return -(-self._elements // self._digits)

    def _pack(self, digits: Tensor) -> Tensor:
        """Write digits of the base into bytes. The digits of a byte are as far apart as there are bytes."""
        first, *others = digits.view(self._digits, -1)
        packed = first.clone()
        for more in others:
            torch.add(more, packed, alpha=self._base, out=packed)
        return packed.to(torch.uint8)

    def _unpack(self, packed: Tensor, message: Message, into: Tensor) -> None:
        count = self._base**self._digits
        if self._base == 3 and self._elements and int(packed.max()) >= count:
            raise message.malformed(f"a byte is {int(packed.max())}, but should be below {count}")
        if self._base == 2:
            places = torch.arange(self._digits - 1, -1, -1, dtype=torch.uint8, device=packed.device)[:, None]
            digits = (packed >> places).bitwise_and_(1)
        else:  # in floating point: integer division takes five times as long
            digits, rest = into.new_empty(self._digits, self._bytes), packed.to(into.dtype)
            for place in range(self._digits - 1, 0, -1):
                quotient = (rest * (1 / 3)).floor_()
                torch.sub(rest, quotient, alpha=3, out=digits[place])
                rest = quotient
            digits[0] = rest
        into.copy_(digits.view(-1)[: self._elements])
        into.mul_(2 // (self._base - 1)).sub_(1)


def _logarithms(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitude (1,), and the code of each. Raises NotFinite if one is infinite or not a number."""
    largest = magnitudes.max().reshape(1) if len(magnitudes) else magnitudes.new_zeros(1)
    finite(largest)
    codes = torch.log2(magnitudes / largest.clamp_min(_TINY)).div_(-_STEP).round_()
    return largest, codes.clamp_(max=_ZERO).to(torch.uint8)
