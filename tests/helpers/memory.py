"""Several ranks in one process: transports that hand messages over in memory, for specifications that need no MPI."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nmt_train.common.message import Message
from nmt_train.transport import Tag
from nmt_train.transport.local import LocalTransport


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
    """Run functions at the same time, one as each rank; what they return, or at once the first error."""
    futures = [concurrent.futures.Future[Any]() for _ in functions]
    for function, future in zip(functions, futures, strict=True):
        threading.Thread(target=_single_threaded, args=(function, future), daemon=True).start()
    done, _ = concurrent.futures.wait(futures, timeout=60, return_when=concurrent.futures.FIRST_EXCEPTION)
    for future in done:
        future.result()
    assert len(done) == len(futures), "a rank has not ended after 60 s"
    return [future.result() for future in futures]


def _single_threaded(function: Callable[[], Any], future: concurrent.futures.Future[Any]) -> None:
    torch.set_num_threads(1)
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
