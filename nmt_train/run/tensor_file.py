"""Writes a safetensors file piece by piece, so that a file may be larger than the memory of the process that writes it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt_train.common import atomic_file as durable

_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
Layout = Mapping[str, tuple[torch.dtype, Sequence[int]]]  # type and shape of each tensor by name


class TensorFile:
    """A new safetensors file with the tensors of `layout`, whose values arrive in any order.

    The values of tensors of one type are contiguous and in the order of `layout`.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self._path = path
        self._starts: dict[str, int] = {}
        header, end = {}, 0
        for name, (dtype, shape) in sorted(layout.items(), key=lambda item: -item[1][0].itemsize):  # stable: keeps the order
            start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            self._starts[name] = start
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # aligns the values
        self._begin = 8 + len(text)
        self._missing = self._begin + end  # bytes
        self._file = open(path, "wb", buffering=0)
        self._write(0, memoryview(len(text).to_bytes(8, "little") + text))

    def write(self, name: str, values: Tensor, start: int = 0) -> None:
        """Write `values` (of the tensor's type) from its element `start` on; they may extend into the next tensors."""
        data = values.detach().cpu().contiguous().view(-1).view(torch.uint8)
        self._write(self._begin + self._starts[name] + start * values.element_size(), data.numpy().data)

    def _write(self, offset: int, data: memoryview) -> None:
        while len(data):
            written = os.pwrite(self._file.fileno(), data, offset)
            offset, data = offset + written, data[written:]
            self._missing -= written

    def close(self) -> dict[str, Any]:
        """Wait until the file is on the disk; returns its size and checksum for the manifest."""
        self._file.close()
        if self._missing:  # else holes would be read as zeros
            raise RuntimeError(f"{self._path}: {self._missing} bytes too few were written")
        durable.sync(self._path)
        return described(self._path)


def described(path: Path) -> dict[str, Any]:
    """The size [bytes] and the checksum of a file, as a checkpoint's manifest has them."""
    with open(path, "rb") as stream:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
