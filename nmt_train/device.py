"""The device that a rank uses, and its performance settings: threads, memory allocator and reduced precision."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from nmt_train.common import container, launcher, shared_cores
from nmt_train.common.errors import UserError
from nmt_train.common.processor import processor

_SEVERAL = re.compile(r"(cpu|cuda)(?:\s*x\s*([1-9]\d{0,2}))?")
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def known(devices: str | list[int]) -> str | list[int]:
    """Return `devices:`, with a single GPU number as a list; raise UserError if its form is invalid. Accesses no device."""
    if isinstance(devices, str) and (number := re.fullmatch(r"\[?\s*(\d+)\s*\]?", devices)):
        devices = [int(number[1])]
    if not devices:
        raise UserError("devices: the list names no GPU; write auto, cpu, cuda, all or numbers like [0]")
    if isinstance(devices, str) and devices not in ("auto", "all") and not _SEVERAL.fullmatch(devices):
        raise UserError(
            f"devices: {devices!r} is unknown; write auto, cpu, cpu x N, cuda, cuda x N, all or a list of GPU numbers like [0]"
        )
    return devices


def choose(devices: str | list[int]) -> list[torch.device]:
    """The devices named by `devices:` (`auto`, `cpu`, `cpu x N`, `cuda`, `cuda x N`, `all`, or GPU numbers).

    Raises UserError if CUDA is requested but unavailable, or if a number names no GPU.
    """
    devices = known(devices)
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices == "auto":
        devices = "cuda" if available else "cpu"
    several = _SEVERAL.fullmatch(devices) if isinstance(devices, str) else None
    if several and several[1] == "cpu":
        return [torch.device("cpu")] * int(several[2] or 1)
    if not available:
        raise UserError(
            f"devices: {devices} asks for a GPU, but torch finds none on this machine (host {socket.gethostname()}); use"
            " devices: cpu"
        )
    if several:
        return [torch.device("cuda", 0)] * int(several[2] or 1)
    numbers = range(available) if devices == "all" else devices
    for number in numbers:
        if not isinstance(number, int) or not 0 <= number < available:
            raise UserError(f"devices: GPU {number} does not exist here; there are {available}, numbered from 0")
    if len(set(numbers)) != len(numbers):
        raise UserError(f"devices: {devices} must name each GPU once")
    return [torch.device("cuda", int(number)) for number in numbers]


def permitted(devices: str | list[int]) -> int:
    """Return how many ranks may share a GPU according to `devices:`."""
    several = _SEVERAL.fullmatch(devices) if isinstance(devices, str) else None
    return int(several[2] or 1) if several and several[1] == "cuda" else 1


def memory(own: torch.device, devices: str | list[int], ranks: int) -> int:
    """The bytes of memory for each rank: of the GPU that ranks share according to `devices:`, or of this machine's `ranks`."""
    if own.type == "cuda":
        return int(torch.cuda.get_device_properties(own).total_memory) // permitted(devices)
    return int(min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), container.memory())) // ranks


def identity(own: torch.device) -> str:
    """Return a name that identifies a GPU on its machine, even if ranks number the GPUs differently; empty for a CPU."""
    if own.type == "cpu":
        return ""
    unique = getattr(torch.cuda.get_device_properties(own), "uuid", None)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return f"GPU {unique or (visible[own.index] if visible[0] else own.index)}"


def described(own: torch.device) -> str:
    """The type of a device, and torch's version, such that devices with the same description round alike."""
    if own.type == "cpu":
        name = f"a CPU ({platform.machine()} {processor()}, {torch.backends.cpu.get_cpu_capability()})"
    else:
        name = str(torch.cuda.get_device_properties(own).name)
    return f"{name} with torch {torch.__version__}"


def prepare(
    devices: str | list[int], threads: int, nodes: tuple[int, ...] = (0,), rank: int = 0, tells: bool = True
) -> torch.device:
    """Return the device of `rank`, and set the number of CPU threads. tells: say it if other work uses the same cores.

    threads: 0 leaves the choice to torch; if a node has several ranks, or a container fewer cores, they share what there is.
    nodes: the node of each rank. If a node has more ranks than this rank sees GPUs, its ranks are assigned to the GPUs in
    rotation. Ranks may see different GPUs, so they compare their GPUs later (start.py) to detect whether two of them share one.

    The process keeps freed memory. A training step frees and allocates the same large blocks repeatedly; glibc would return
    each block to the kernel, which must clear its pages before the next use. Keeping the blocks makes a step about 10% faster.
    """
    beside = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    found = choose(devices if devices not in ("auto", "cuda") or len(beside) == 1 else _all_of(devices))
    own = found[beside.index(rank) % len(found)]
    if own.type == "cuda":
        torch.cuda.set_device(own)
        torch.set_float32_matmul_precision("high")  # fp32 products by TF32: several times as fast, and models are as good
        # It prepares a plan for every new shape, and batches hardly ever repeat one: training took 2.5 times as long.
        torch.backends.cuda.enable_cudnn_sdp(False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = container.cores() / len(beside)
    if threads or ((len(beside) > 1 or quota < cores) and "OMP_NUM_THREADS" not in os.environ):
        # A launcher that binds ranks to cores has already divided the cores.
        divided = cores // (len(beside) if cores == os.cpu_count() or launcher.UNBOUND in os.environ else 1)
        torch.set_num_threads(threads or max(1, math.ceil(min(divided, quota))))
    shared_cores.watch(tells=tells and rank == beside[0])
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return own  # a C library without mallopt: training is only slower
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, 1 << 28)
    return own


def prepare_one(devices: str, threads: int) -> torch.device:
    """`prepare` for a command that uses a single device; raises UserError if `--devices` names several."""
    found = choose(devices)
    if len(found) > 1:
        raise UserError(f"--devices {devices}: names {len(found)} devices, but one is used; name one, such as cpu or 0")
    return prepare(devices, threads, tells=False)


def _all_of(devices: str | list[int]) -> str:
    """Resolve `auto` or `cuda` for several ranks on one machine: all GPUs, or the CPU if `auto` finds no GPU."""
    return "all" if devices == "cuda" or torch.cuda.is_available() else "cpu"


def has_bf16(own: torch.device) -> bool:
    """Whether the device has instructions for bf16; without them, torch falls back to slow loops on a CPU."""
    if own.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def peak(own: torch.device, step: Callable[[], None]) -> float:
    """The bytes of GPU memory that torch has in use at most during `step`; infinite if they are not enough."""
    release()
    torch.cuda.reset_peak_memory_stats(own)
    try:
        step()
        torch.cuda.synchronize(own)
    except torch.OutOfMemoryError:
        return math.inf
    return float(torch.cuda.max_memory_allocated(own))


def slow_precision(own: torch.device, precision: str) -> str:
    """Return a warning if this CPU lacks the instructions for `precision`, so that torch falls back to slow loops; else ""."""
    if precision == "fp32" or own.type != "cpu" or has_bf16(own):
        return ""
    return f"precision: the CPU of host {socket.gethostname()} has no instructions for bf16; fp32 is several times as fast"


def compiled(function: Callable[..., Tensor], own: torch.device) -> Callable[..., Tensor]:
    """Compile a function with torch.compile for any shapes; raise UserError if the C or C++ compiler is missing."""
    names = ("gcc", "clang", "cc") if own.type == "cuda" else ("g++", "clang++", "c++")
    given = os.environ.get("CC" if own.type == "cuda" else "CXX")
    if not any(map(shutil.which, (given,) if given else names)):
        raise UserError(
            f"compile: it needs a C or C++ compiler, but host {socket.gethostname()} has none ({given or ', '.join(names)});"
            " install one, or set compile: false"
        )
    made: Callable[..., Tensor] = torch.compile(function, dynamic=True)
    return made


def inherit() -> Callable[[], None]:
    """Return a function that a new thread must call first: it sets the caller's current GPU, which is otherwise GPU 0."""
    return partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_initialized() else _nothing


def settle(own: torch.device) -> Callable[[], None] | None:
    """Return a function that waits for a device's queued work, or None if the device has no queue."""
    return partial(torch.cuda.synchronize, own) if own.type == "cuda" else None


def random(own: torch.device) -> dict[str, Tensor]:
    """Return the states of the torch random generators that a rank on this device uses, as CPU tensors."""
    states = {"cpu": torch.get_rng_state()}
    if own.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(own)
    return states


def set_random(own: torch.device, states: Mapping[str, Tensor]) -> None:
    """Restore the states that `random` returned for this or another device; a generator without a saved state is unchanged."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if own.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], own)


def release() -> None:
    """Collect reference cycles, and release the GPU memory that torch caches."""
    gc.collect()
    torch.cuda.empty_cache()


def _nothing() -> None:
    pass
