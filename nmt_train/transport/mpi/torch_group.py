"""A process group of torch.distributed for all ranks: over NCCL if they compute on GPUs, otherwise over gloo."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from nmt_train.common.errors import UserError
from nmt_train.common.message import from_json, to_json
from nmt_train.transport import Lost, Messages, Tag, describe

_LOOK, _PATIENCE = 5e-4, 2.0  # seconds
_UNLIMITED = timedelta(days=365)


class Group:
    """The constructor waits at most `deadline` seconds for all ranks.

    A sum waits for as long as the other ranks live, however late they are (one may validate or compile): `alive` raises if one
    has ended, or is silent.

    Ranks reach rank 0 under its host name, or under the environment variable MASTER_ADDR. GLOO_SOCKET_IFNAME and
    NCCL_SOCKET_IFNAME select the network.
    """

    def __init__(self, transport: Messages, kind: str, deadline: float, alive: Callable[[], None]) -> None:
        """kind: type of the device that holds the vectors. Raises UserError if ranks have different types or cannot connect."""
        self._alive = alive
        span = timedelta(seconds=deadline)
        here = "localhost" if len(set(transport.nodes)) == 1 else os.environ.get("MASTER_ADDR", transport.hosts[0])
        try:
            if transport.rank == 0:
                store = TCPStore(here, 0, transport.size, True, span, wait_for_workers=False)
                for rank in range(1, transport.size):
                    transport.send(rank, Tag.HELLO, from_json({"host": here, "port": store.port, "device": kind}))
            else:
                found = to_json(transport.receive(0, Tag.HELLO).result()[1])
                if found["device"] != kind:
                    raise UserError(
                        "replicas.algorithm: torch needs the same type of device on all ranks, but"
                        f" {describe(transport, 0)}"
                        f" computes on {found['device']} and this rank on {kind}; use ring, or the same devices everywhere"
                    )
                store = TCPStore(found["host"], found["port"], transport.size, False, span)
            backend = "nccl" if kind == "cuda" else "gloo"
            if dist.is_initialized():
                dist.destroy_process_group()  # the group from before some ranks ended
            dist.init_process_group(backend, store=store, rank=transport.rank, world_size=transport.size, timeout=span)
            _set_pg_timeout(_UNLIMITED)
        except (RuntimeError, ValueError) as error:
            self._blame_the_lost()
            raise UserError(
                "replicas.algorithm: torch.distributed cannot connect to the other ranks from host"
                f" {transport.hosts[transport.rank]}"
                f" ({_first_line(error)});"
                " set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME there, or MASTER_ADDR on rank 0's host, or use ring"
            ) from None

    @torch.no_grad()
    def add_up(self, vector: Tensor) -> None:
        """Replace `vector` (elements,) by the sum of all ranks' vectors. Raises as `alive` does, or Lost if a rank is lost."""
        try:
            work = dist.all_reduce(vector, async_op=True)
            while not work.is_completed():
                self._alive()
                time.sleep(_LOOK)
            work.wait()
        except RuntimeError as error:
            self._blame_the_lost()
            raise Lost(f"torch.distributed has lost another rank ({_first_line(error)})") from None

    def _blame_the_lost(self) -> None:
        """If the reason of an error is a rank that has ended, raise the transport's error, which may come a little later."""
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            self._alive()
            time.sleep(_LOOK)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["?"])[0][:200]
