"""Checks that all replicas of the parameters are bit-identical."""

from __future__ import annotations

import hashlib

from torch import Tensor

from nmt_train.common.errors import UserError
from nmt_train.common.message import from_bytes, to_bytes
from nmt_train.transport import Messages, Tag, describe


def compare(transport: Messages, vector: Tensor) -> None:
    """Compare this rank's vector bit by bit with that of the previous rank; raises UserError if they differ.

    All ranks must call this together.
    """
    if transport.size == 1 or vector.is_meta:
        return
    mine = hashlib.blake2b(vector.cpu().numpy().tobytes(), digest_size=16).digest()
    transport.send((transport.rank + 1) % transport.size, Tag.REPLICA, from_bytes(mine))
    before = (transport.rank - 1) % transport.size
    if to_bytes(transport.receive(before, Tag.REPLICA).result()[1]) != mine:
        raise UserError(
            f"{describe(transport, transport.rank)} and {describe(transport, before)} have different parameters, which should"
            " be bit-identical: one of the two machines computes or stores wrong values, or they round differently (another"
            " type of device, another version of torch); resume from the last checkpoint without the faulty machine"
        )
