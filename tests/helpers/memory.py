"""Several ranks in one process: transports that hand messages over in memory, for specifications that need no MPI."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nmt_train.distributed.message import Message
from nmt_train.distributed.transport import Tag
from nmt_train.distributed.transport.local import LocalTransport


class MemoryTransport(LocalTransport):
    """What is sent is copied, as on a network, and there at once."""

    def __init__(self, rank: int, nodes: Sequence[int], all_wires: list[MemoryTransport]) -> None:
        super().__init__()
        self.rank, self.size, self.nodes = rank, len(nodes), tuple(nodes)
        self.hosts = tuple(f"host{node}" for node in nodes)
        self._all = all_wires

    def _carry(self, to: int, tag: Tag, message: Message) -> concurrent.futures.Future[None]:
        copied = Message(message.numbers, tuple(tensor.clone() for tensor in message.tensors))
        self._all[to].deliver(self.rank, tag, copied)
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        done.set_result(None)
        return done


def transports(nodes: Sequence[int]) -> list[MemoryTransport]:
    made: list[MemoryTransport] = []
    made.extend(MemoryTransport(rank, nodes, made) for rank in range(len(nodes)))
    return made


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions at the same time, one as each rank; what they return, or the first error."""
    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(_single_threaded, function) for function in functions]
        return [future.result(timeout=60) for future in futures]


def _single_threaded(function: Callable[[], Any]) -> Any:
    torch.set_num_threads(1)
    return function()
