"""The largest elements of every tile, with values of two bits (SparseLoCo, Sarfi et al. 2025, section 3)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt_train.codec.codec import Codec
from nmt_train.codec.config import CodecConfigs, TileConfig
from nmt_train.codec.integer_coding import from_rice, rice, rice_width
from nmt_train.codec.selection import LargestOfRows
from nmt_train.common.compiled import compiled
from nmt_train.common.message import Message

_EDGE = 1.5  # in standard deviations from the mean: four bins of equal width over six standard deviations
_BITS = 2  # of a value
_PER_BYTE, _BINS = 8 // _BITS, 2**_BITS  # _BINS: entries of a tile's table


class TileTopK(Codec):
    """A message holds, for every tile, the positions of the largest elements, their codes, and a table.

    Positions are Rice-coded distances, which take 7.5 bits each if 64 elements of a tile are sent; SparseLoCo uses 12 bits.
    The table of a tile has the means of four bins around the mean of its values. A vector ends with a tile of fewer elements,
    which is padded with zeros.
    """

    drops = fixed_share = True

    def __init__(self, config: TileConfig) -> None:
        self._size, self._keep = config.size, config.keep
        self._width = rice_width(config.keep / config.size)
        self._largest, self._largest_of_rest = LargestOfRows(config.keep), LargestOfRows(config.keep)

    @classmethod
    def build(cls, configs: CodecConfigs, dropped: float) -> TileTopK:
        return cls(configs.tiles)

    def encode(self, vector: Tensor, update: int) -> Message:
        return self._encoded(vector)[0]

    def encode_away(self, vector: Tensor, update: int) -> Message:
        message, positions, codes = self._encoded(vector)
        positions, values = self._decoded(positions, codes, message.tensors[2], vector.numel())
        vector.index_add_(0, positions, values, alpha=-1.0)
        return message

    def _encoded(self, vector: Tensor) -> tuple[Message, Tensor, Tensor]:
        """The message, the positions (tiles * kept,), and the codes (tiles, kept)."""
        whole = vector.numel() // self._size * self._size
        rest = vector.new_zeros(self._tiles(vector.numel() - whole), self._size)
        rest.view(-1)[: vector.numel() - whole] = vector[whole:]
        first, values = self._largest.find(vector[:whole].view(-1, self._size))
        last, more = self._largest_of_rest.find(rest)
        positions, values = torch.cat([first, last + whole]), torch.cat([values, more]).view(-1, self._keep)
        codes, table = _bins(values)
        distances = np.diff(positions.cpu().numpy(), prepend=-1) - 1
        packed = torch.from_numpy(rice(distances, self._width)).to(vector.device)
        tensors = packed, _pack_codes(codes.flatten()), table.flatten().to(torch.bfloat16)
        return Message((vector.numel(),), tensors), positions, codes

    def encode_shape(self, vector: Tensor) -> Message:
        tiles = self._tiles(vector.numel())
        longer = (1 - self._keep / self._size) ** 2**self._width  # the probability of each further bit, at random positions
        bits = self._width + 1 + longer / (1 - longer)
        packed = vector.new_empty(round(tiles * self._keep * bits / 8), dtype=torch.uint8)
        codes = vector.new_empty(self._code_bytes(tiles), dtype=torch.uint8)
        return Message((vector.numel(),), (packed, codes, vector.new_empty(tiles * _BINS, dtype=torch.bfloat16)))

    def _tiles(self, elements: int) -> int:
        return -(-elements // self._size)

    def _code_bytes(self, tiles: int) -> int:
        return -(-tiles * self._keep // _PER_BYTE)

    def decode(self, message: Message, into: Tensor) -> None:
        into.zero_()
        self.add(message, into)

    def add(self, message: Message, into: Tensor, scale: float = 1.0) -> None:
        positions, values = self.sent(message, into.numel())
        into.index_add_(0, positions.to(into.device), values.to(into), alpha=scale)

    def sent(self, message: Message, elements: int) -> tuple[Tensor, Tensor]:
        """The positions (int64) and values (fp32) in a message for a vector of this length; Malformed if it does not fit."""
        if message.number() != elements:
            raise message.malformed(f"for a vector of {message.number()} elements, not of {elements}")
        tiles = self._tiles(elements)
        packed, packed_codes, table = message.vectors(
            (torch.uint8, None), (torch.uint8, self._code_bytes(tiles)), (torch.bfloat16, tiles * _BINS)
        )
        count = tiles * self._keep
        try:
            distances = from_rice(packed.cpu().numpy(), count, self._width)
        except ValueError as error:
            raise message.malformed(str(error)) from None
        positions = torch.from_numpy(np.cumsum(distances + 1) - 1).to(packed.device)
        if count and int(positions[-1]) >= tiles * self._size:
            raise message.malformed(f"position {int(positions[-1])} in a vector of {elements} elements")
        codes = _unpack_codes(packed_codes, count).view(tiles, self._keep)
        return self._decoded(positions, codes, table, elements)

    def _decoded(self, positions: Tensor, codes: Tensor, table: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """Positions and values without the padding. positions: (tiles * kept,), ascending; codes: (tiles, kept)."""
        values = table.float().view(-1, _BINS).gather(1, codes.long())
        inside = int(torch.searchsorted(positions, elements))  # padding has the largest positions
        return positions[:inside], values.flatten()[:inside]


def _bins(values: Tensor) -> tuple[Tensor, Tensor]:
    """The bin of each value (tiles, kept), as uint8, and the means of the bins (tiles, 4)."""
    if values.is_cpu:
        codes, table = torch.empty(values.shape, dtype=torch.uint8), values.new_empty(len(values), 4)
        _bins_on_cpu(values.numpy(), codes.numpy(), table.numpy())
        return codes, table
    return _bins_with_torch(values)


def _bins_with_torch(values: Tensor) -> tuple[Tensor, Tensor]:
    away = values - values.mean(1, keepdim=True)
    deviation = away.square().mean(1, keepdim=True).sqrt_()
    codes = (away >= 0).long() + (away >= -_EDGE * deviation) + (away >= _EDGE * deviation)
    totals = values.new_zeros(len(values), 4).scatter_add_(1, codes, values)
    counts = values.new_zeros(len(values), 4).scatter_add_(1, codes, torch.ones_like(values))
    return codes.to(torch.uint8), totals / counts.clamp_min(1)


@compiled
def _bins_on_cpu(values: NDArray[np.float32], codes: NDArray[np.uint8], table: NDArray[np.float32]) -> None:
    kept = values.shape[1]
    for tile in range(len(values)):
        row = values[tile]
        mean = row.sum() / kept
        squares = 0.0
        for value in row:
            squares += (value - mean) ** 2
        outer = _EDGE * np.sqrt(squares / kept)
        totals, counts = np.zeros(4), np.zeros(4)
        for place in range(kept):
            away = row[place] - mean
            code = int(away >= 0) + int(away >= -outer) + int(away >= outer)
            codes[tile, place] = code
            totals[code] += row[place]
            counts[code] += 1
        for code in range(4):
            table[tile, code] = totals[code] / max(counts[code], 1)


def _pack_codes(codes: Tensor) -> Tensor:
    padded = torch.cat([codes, codes.new_zeros(-codes.numel() % _PER_BYTE)]).view(-1, _PER_BYTE)
    return (padded << _shifts(codes.device)).sum(1, dtype=torch.uint8)


def _unpack_codes(packed: Tensor, count: int) -> Tensor:
    return ((packed[:, None] >> _shifts(packed.device)) & (2**_BITS - 1)).flatten()[:count]


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 8, _BITS, dtype=torch.uint8, device=device)
