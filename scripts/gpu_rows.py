"""The rows of scripts/check_gpu: checks and measurements on a GPU."""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from prepare import ROOT
from pydantic import TypeAdapter
from safetensors.torch import load_file

from nmt_train import config
from nmt_train import device as devices
from nmt_train.corpus.batch import Turn, assemble
from nmt_train.model.transformer import Transformer
from nmt_train.modes.table import MODES
from nmt_train.run.log import read_metrics
from nmt_train.simulation.cluster import Cost
from nmt_train.training.worker import Worker
from nmt_train.transport.local import LocalTransport

NOT_RUN = "not run"  # prefix of the result of a row that could not run
LAST_WORDS = 300  # characters of the output of a failed row


@dataclass(frozen=True)
class Row:
    """A check. `work` gets a device and its own folder; it returns its result as text, or raises."""

    name: str
    seconds: float  # time limit
    work: Callable[[str, Path], str]
    alone: bool = False  # it measures speed
    cpu: bool = True  # can be tried on the CPU


class Failed(Exception):
    """A check failed; the message says why."""


def corpus(folder: Path) -> Path:
    found = folder.parent / "corpus"
    if not (found / "train.en").exists():
        beside = folder.parent / f"corpus.{os.getpid()}"
        runpy.run_path(str(ROOT / "scripts" / "make_demo_corpus"))["make"](beside, 1, 2000, 50)
        with suppress(OSError):  # another row has created it first
            beside.rename(found)
    return found


def corpus_settings(folder: Path) -> dict[str, Any]:
    data = corpus(folder)
    sides = {f"corpus.{part}": [f"{data}/{part}.en", f"{data}/{part}.de"] for part in ("train", "valid")}
    return sides | {"corpus.vocabulary.size": 300}


def train(folder: Path, device: str, ranks: int, more: dict[str, Any]) -> list[dict[str, Any]]:
    """Train a small model on the demo corpus; return the events of the run."""
    settings = corpus_settings(folder) | {
        "run": folder, "devices": device if ranks == 1 else f"{device} x {ranks}", "threads": 1,
        "batch.tokens": 600, "model.encoder_layers": 2, "model.decoder_layers": 2,
        "model.dim": 64, "model.ffn_dim": 128, "optimizer.learning_rate": 0.003, "optimizer.warmup": 10,
        "optimizer.async_warmup": 10, "validation.metrics": ["cross-entropy"], "validation.every": "3e",
        "checkpoint.every": "1000u", "stop.after": "3e", "log.every": "20u",
    } | more  # fmt: skip
    _call("nmt_train.cli.entry", settings)
    return read_metrics(folder / "metrics.jsonl")


def _call(module: str, settings: dict[str, Any], *more: str) -> str:
    """Call the command of a module; returns its output."""
    command = [sys.executable, "-c", f"import sys; from {module} import main; sys.exit(main())", *more]
    for key, value in settings.items():
        command += [f"--{key}", json.dumps(value) if isinstance(value, list) else str(value)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise Failed(f"status {done.returncode}: {done.stderr[-LAST_WORDS:]}")
    return done.stdout


def learns(mode: str, ranks: int, more: dict[str, Any]) -> Callable[[str, Path], str]:
    """The final cross-entropy must be below that of a uniform distribution."""

    def work(device: str, folder: Path) -> str:
        own = {"local.every": 10} if mode in ("local-sgd", "diloco", "diloco-async") else {}
        events = train(folder, device, ranks, {"mode": mode, **own, **more})
        last = [event for event in events if event["event"] == "validation"][-1]
        entropy = last["cross-entropy"]
        if not entropy < math.log(300):  # also true for NaN
            raise Failed(f"cross-entropy {entropy} after {last['update']} updates")
        return f"cross-entropy {math.log(300):.2f} to {entropy:.2f} in {last['update']} updates"

    return work


def resumes(mode: str, ranks: int) -> Callable[[str, Path], str]:
    """An interrupted and resumed run must end with the same parameters, bit for bit, as an uninterrupted one."""

    def work(device: str, folder: Path) -> str:
        whole, cut = folder / "whole", folder / "cut"
        common = {"mode": mode, "model.dropout": 0.1}
        train(whole, device, ranks, {**common, "stop.after": "60u"})
        for end in ("25u", "60u"):
            train(cut, device, ranks, {**common, "stop.after": end})
        ours, theirs = (load_file(run / "last" / "parameters.safetensors") for run in (whole, cut))
        for name, tensor in ours.items():
            if not torch.equal(tensor.view(torch.int32), theirs[name].view(torch.int32)):
                raise Failed(f"{name} differs by up to {float((tensor - theirs[name]).abs().max()):.2g}")
        return f"{len(ours)} tensors are bitwise equal"

    return work


def tests(device: str, folder: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_device.py", "tests/test_gpu.py"]
    command += ["-m", "gpu"] if device == "cuda" else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = [line for line in done.stdout.splitlines() if line.strip()] or [done.stderr]
    if done.returncode:
        raise Failed("; ".join(line for line in last if line.startswith("FAILED")) or last[-1])
    return last[-1]


def nccl(device: str, folder: Path) -> str:
    if device == "cuda" and torch.cuda.device_count() < 2:
        return f"{NOT_RUN}: NCCL needs a GPU per rank, and this machine has only one"
    more = {"replicas.algorithm": "torch"} | ({"devices": "[0, 1]"} if device == "cuda" else {})
    return learns("sync", 2, more)(device, folder)


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


def speed(preset: str, compiled: bool) -> Callable[[str, Path], str]:
    """The real training loop on random batches."""

    def work(device: str, folder: Path) -> str:
        small = device == "cpu"
        vocabulary, tokens, steps = (300, 400, 3) if small else (32_000, 25_000, 30)
        values = {"corpus": {"train": ["-", "-"], "valid": ["-", "-"]}, "precision": "bf16", "stop": {"after": "1e"},
                  "model": {"preset": "tiny" if small else preset}}  # fmt: skip
        settings, own = config.validate(values, {}), devices.prepare(device, 0)
        rate = matmul_rate(own)
        model = Transformer(settings.model, vocabulary).to(own)
        if compiled:
            model.train_by(devices.compiled(model.states, own))
        worker = Worker(settings, LocalTransport(), model, Random(tokens, vocabulary))
        coordinator = Steps(worker, steps, steps)  # the first steps compile, which takes minutes
        worker.run(coordinator)
        (start, before), (end, after) = coordinator.start, coordinator.now()
        words, parameters = (after - before) / (end - start), worker.flat.parameters.numel()
        memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if own.type == "cuda" else ""
        found = f"{words:,.0f} words/s, MFU {6 * parameters * words / rate:.0%} of {rate / 1e12:.3g} TFLOP/s{memory}"
        return found + f", {parameters / 1e6:.0f}M parameters" + " (preset tiny instead)" * small

    return work


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
        tokens = 400 if small else 4480
        settings = corpus_settings(folder) | {
            "run": folder, "devices": device, "precision": precision, "model.preset": "tiny" if small else "base",
            "batch.tokens": tokens, "stop.after": "1e",
        }  # fmt: skip
        measured = yaml.safe_load(_call("nmt_train.cli.simulate", settings, "--measure", "--steps", "6" if small else "40"))

        def both(costs: dict[str, Any], kinds: tuple[str, str], amount: float, unit: float) -> str:
            return " + ".join(f"{TypeAdapter(Cost).validate_python(costs[kind]).of(amount) / unit:.3g}" for kind in kinds)

        step = both(measured, ("forward", "backward"), tokens, 1e-3)
        codecs = {"top-k": measured} | measured.get("codecs", {})
        each = [f"{name} {both(its, ('encode', 'decode'), 1, 1e-9)}" for name, its in codecs.items()]
        return f"{tokens:,} tokens take {step} ms (forward + backward); encode + decode, ns per element: {'; '.join(each)}"

    return work


ROWS = [
    Row("tests", 400, tests),
    *(Row(f"{mode} x {ranks}", 180, learns(mode, ranks, {})) for mode in MODES if mode != "single" for ranks in (2, 4)),
    Row("single, bf16", 120, learns("single", 1, {"precision": "bf16"})),
    Row("single, compiled", 300, learns("single", 1, {"compile": True}), cpu=False),
    Row("single, resumed", 240, resumes("single", 1)),
    Row("sync x 2, resumed", 300, resumes("sync", 2)),
    Row("NCCL", 180, nccl),
    *(
        Row(
            f"{preset}{', compiled' * compiled}", 600 if compiled else 300, speed(preset, compiled),
            alone=True, cpu=not compiled,
        )
        for preset in ("base", "big") for compiled in (False, True)
    ),
    Row("codecs", 300, codecs, alone=True),
    *(Row(f"profile of base, {precision}", 240, costs(precision), alone=True) for precision in ("fp32", "bf16")),
]  # fmt: skip
