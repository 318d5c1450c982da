"""How fast training is on a GPU: the rows of the stage `speed` of scripts/check_gpu.

The real training loop runs on random batches. MarianMT of Hugging Face's transformers runs in a plain loop on the same batches.
"""

from __future__ import annotations

import math
import runpy
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from gpu_row import NOT_RUN, Failed, call, corpus_settings
from prepare import ROOT
from pydantic import TypeAdapter

from nmt_train import config
from nmt_train import device as devices
from nmt_train.corpus.batch import Turn, assemble
from nmt_train.model.transformer import Transformer
from nmt_train.simulation.cluster import Cost
from nmt_train.training.worker import Worker
from nmt_train.transport.local import LocalTransport

Work = Callable[[str, Path], str]
LARGE, SMALL = 25_000, 4480  # target tokens of a batch
_SIZES = (2048, SMALL, 12_500, LARGE, 50_000)
_VOCABULARY, _SHOWN = 32_000, 12


def matmul_rate(own: torch.device) -> float:
    """FLOP/s of a square product in bf16, the best of several."""
    size, best = (8192 if own.type == "cuda" else 512), math.inf
    a = torch.randn(size, size, device=own, dtype=torch.bfloat16)
    for _ in range(10):
        start = time.perf_counter()
        float((a @ a)[0, 0])
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


class Random:
    """Batches of random words with `tokens` target positions; sources have similar lengths and are padded."""

    def __init__(self, tokens: int, vocabulary: int) -> None:
        self._tokens, self._vocabulary = tokens, vocabulary

    def stream(self, data_shard: Any, position: Any) -> Any:
        random = np.random.default_rng(1)
        while True:
            length = int(random.integers(10, 60))
            sides = (
                [
                    random.integers(4, self._vocabulary, int(size))
                    for size in random.integers(low, length, self._tokens // length)
                ]
                for low in (length - 5, length - 1)
            )
            yield Turn(assemble(*sides), False)

    def epochs(self, length: Any) -> float:
        return math.inf

    def described(self, batch: Any) -> str:
        return "random words"


class Steps:
    """A coordinator that ends training after a number of steps, the first of which are not timed."""

    def __init__(self, worker: Any, settling: int, steps: int) -> None:
        self._worker, self._left, self._steps, self.start = worker, settling + steps, steps, (0.0, 0)

    def should_continue(self) -> bool:
        if self._left == self._steps:
            self.start = self.now()
        self._left -= 1
        return self._left >= 0

    def now(self) -> tuple[float, int]:
        float(self._worker.flat.parameters[0])  # waits for the device
        return time.perf_counter(), self._worker.progress.tokens

    def step_done(self, updated: bool) -> None:
        pass

    def skipped(self, what: str) -> None:
        raise Failed(what)


def worker_for(own: torch.device, preset: str, tokens: int, compiled: bool = False, optimizer: str = "adam") -> Worker:
    """A worker that trains in bf16 on random batches; with a tiny model on a CPU."""
    small = own.type == "cpu"
    values = {
        "corpus": {"train": ["-", "-"], "valid": ["-", "-"]}, "precision": "bf16", "stop": {"after": "1e"},
        "model": {"preset": "tiny" if small else preset}, "optimizer": {"name": optimizer},
    }  # fmt: skip
    settings, vocabulary = config.validate(values, {}), 300 if small else _VOCABULARY
    model = Transformer(settings.model, vocabulary).to(own)
    if compiled:
        model.compile_layers(partial(devices.compiled, own=own))
    return Worker(settings, LocalTransport(), model, Random(400 if small else tokens, vocabulary))


def settled(worker: Worker, steps: int) -> tuple[float, float]:
    """Seconds of a step, and its target tokens, after as many steps that are not timed (the first compile)."""
    worker.run(coordinator := Steps(worker, steps, steps))
    (start, before), (end, after) = coordinator.start, coordinator.now()
    return (end - start) / steps, (after - before) / steps


def speed(preset: str, tokens: int, compiled: bool = False, rival: bool = False, optimizer: str = "adam") -> Work:
    """Words/s, and their share of what products of matrices reach."""

    def work(device: str, folder: Path) -> str:
        if rival and find_spec("transformers") is None:
            return f"{NOT_RUN}: the package transformers is not installed"
        own, began = devices.prepare(device, 0), time.perf_counter()
        rate, steps = matmul_rate(own), 3 if device == "cpu" else 30
        worker = worker_for(own, preset, tokens, compiled, optimizer)
        seconds, words = marian_mt(worker, steps) if rival else settled(worker, steps)
        parameters = worker.flat.parameters.numel()
        memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if own.type == "cuda" else ""
        share = 6 * parameters * words / seconds / rate
        return (
            f"{words / seconds:,.0f} words/s, {1e3 * seconds:.1f} ms per step, MFU {share:.0%} of {rate / 1e12:.3g} TFLOP/s"
            f"{memory}, {parameters / 1e6:.0f}M parameters, {time.perf_counter() - began:.0f} s in all"
        )

    return work


def marian_mt(worker: Worker, steps: int) -> tuple[float, float]:
    """`settled` for MarianMT with the sizes and the batches of `worker`."""
    bench: Any = SourceFileLoader("bench_throughput", str(ROOT / "scripts" / "bench_throughput")).load_module()
    vocabulary = worker.model.target_embedding.shape[0]
    step = bench.marian_mt(worker.config.model, vocabulary, "bf16", worker.device)
    stream = worker.batches.stream(worker.data_shard, worker.position)
    batches = [next(stream).batch for _ in range(2 * steps)]
    for batch in batches[:steps]:
        step(batch)
    wait = devices.settle(worker.device) or (lambda: None)
    wait()
    start = time.perf_counter()
    for batch in batches[steps:]:
        step(batch)
    wait()
    return (time.perf_counter() - start) / steps, sum(batch.target_tokens for batch in batches[steps:]) / steps


def kernels(device: str, folder: Path) -> str:
    """How a step's time is shared among kinds of kernels; the whole table is in runs/check_gpu-DEVICE."""
    own, activities = devices.prepare(device, 0), [torch.profiler.ProfilerActivity.CPU]
    if own.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    worker, steps = worker_for(own, "base", LARGE), 5
    settled(worker, steps)
    with torch.profiler.profile(activities=activities) as profile:
        worker.run(Steps(worker, 0, steps))
        (devices.settle(own) or (lambda: None))()
    averages = profile.key_averages()
    key = "self_device_time_total" if own.type == "cuda" else "self_cpu_time_total"
    (folder.parent / "kernels.txt").write_text(averages.table(sort_by=key, row_limit=100), encoding="utf-8")
    spent = Counter({event.key: getattr(event, key) / steps / 1e3 for event in averages})
    total = sum(spent.values())
    shown = "; ".join(f"{name[:40]} {its:.2f}" for name, its in spent.most_common(_SHOWN))
    return f"{total:.1f} ms per step: {shown}"


def step_times(device: str, folder: Path) -> str:
    """Milliseconds of a step by the target tokens of its batch: what configs/clusters/h200.yml needs."""
    own = devices.prepare(device, 0)
    found = []
    for tokens in _SIZES[: None if own.type == "cuda" else 1]:
        seconds, words = settled(worker_for(own, "base", tokens), 3 if own.type == "cpu" else 20)
        found.append(f"{words:,.0f} tokens {1e3 * seconds:.1f} ms")
        devices.release()
    return "; ".join(found)


def codecs(device: str, folder: Path) -> str:
    """Time to encode and decode, in units of copying the vector on the device (scripts/bench_codecs)."""
    bench, own = runpy.run_path(str(ROOT / "scripts" / "bench_codecs")), devices.prepare(device, 1)
    gradient = torch.randn(65_000_000 if own.type == "cuda" else 100_000, device=own)
    found = []
    for name in bench["CODECS"]:
        _, _, *times = bench["measured"](name, gradient, torch.empty_like(gradient), 5, own).split("|")
        found.append(f"{name}: {' + '.join(map(str.strip, times[:3]))}")
    return "encode + with feedback + decode in copies: " + "; ".join(found)


def costs(precision: str) -> Callable[[str, Path], str]:
    """What nmt-simulate --measure measures: a step with batches of the size in docs/comparison.md, and the codecs."""

    def work(device: str, folder: Path) -> str:
        small = device == "cpu"
        tokens = 400 if small else SMALL
        settings = corpus_settings(folder) | {
            "run": folder, "devices": device, "precision": precision, "model.preset": "tiny" if small else "base",
            "batch.tokens": tokens, "stop.after": "1e",
        }  # fmt: skip
        measured = yaml.safe_load(call("nmt_train.cli.simulate", settings, "--measure", "--steps", "6" if small else "40"))

        def both(costs: dict[str, Any], kinds: tuple[str, str], amount: float, unit: float) -> str:
            return " + ".join(f"{TypeAdapter(Cost).validate_python(costs[kind]).of(amount) / unit:.3g}" for kind in kinds)

        step = both(measured, ("forward", "backward"), tokens, 1e-3)
        codecs = {"top-k": measured} | measured.get("codecs", {})
        each = [f"{name} {both(its, ('encode', 'decode'), 1, 1e-9)}" for name, its in codecs.items()]
        return f"{tokens:,} tokens take {step} ms (forward + backward); encode + decode, ns per element: {'; '.join(each)}"

    return work
