"""The rows of scripts/check_gpu: checks and measurements on a GPU."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_row import NOT_RUN, Failed, Row, call, corpus_settings
from gpu_speed import LARGE, SMALL, codecs, costs, kernels, speed, step_times
from prepare import ROOT
from safetensors.torch import load_file

from nmt_train.modes.table import MODES
from nmt_train.run.log import read_metrics


def train(folder: Path, device: str, ranks: int, more: dict[str, Any]) -> list[dict[str, Any]]:
    """Train a small model on the demo corpus; return the events of the run."""
    settings = corpus_settings(folder) | {
        "run": folder, "devices": device if ranks == 1 else f"{device} x {ranks}", "threads": 1,
        "batch.tokens": 600, "model.encoder_layers": 2, "model.decoder_layers": 2,
        "model.dim": 64, "model.ffn_dim": 128, "optimizer.learning_rate": 0.003, "optimizer.warmup": 10,
        "optimizer.async_warmup": 10, "validation.metrics": ["cross-entropy"], "validation.every": "3e",
        "checkpoint.every": "1000u", "stop.after": "3e", "log.every": "20u",
    } | more  # fmt: skip
    call("nmt_train.cli.entry", settings)
    return read_metrics(folder / "metrics.jsonl")


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


CHOICES = ("sync", "low-bit", "sparse-overlap", "sparse-local", "sparse-local-async")  # those that README recommends

ROWS = [  # in each stage, the most valuable ones first
    Row("speed", "base", 120, speed("base", LARGE), alone=True),
    Row("speed", "base, MarianMT", 120, speed("base", LARGE, rival=True), alone=True),
    Row("speed", f"base, {SMALL:,} tokens", 120, speed("base", SMALL), alone=True),
    Row("speed", f"base, {SMALL:,} tokens, MarianMT", 120, speed("base", SMALL, rival=True), alone=True),
    Row("speed", "base, compiled", 200, speed("base", LARGE, compiled=True), alone=True, cpu=False),
    Row("speed", "big", 120, speed("big", LARGE), alone=True),
    Row("speed", "base, muon", 120, speed("base", LARGE, optimizer="muon"), alone=True),
    Row("speed", "kernels of base", 120, kernels, alone=True),
    Row("speed", "steps of base", 180, step_times, alone=True),
    Row("speed", "codecs", 300, codecs, alone=True),
    *(Row("speed", f"profile of base, {precision}", 240, costs(precision), alone=True) for precision in ("fp32", "bf16")),
    Row("speed", "big, compiled", 300, speed("big", LARGE, compiled=True), alone=True, cpu=False),
    Row("tests", "tests", 400, tests),
    Row("tests", "single, bf16", 120, learns("single", 1, {"precision": "bf16"})),
    Row("tests", "single, compiled", 300, learns("single", 1, {"compile": True}), cpu=False),
    Row("tests", "single, resumed", 240, resumes("single", 1)),
    Row("tests", "sync x 2, resumed", 300, resumes("sync", 2)),
    Row("tests", "NCCL", 180, nccl),
    *(
        Row("modes", f"{mode} x {ranks}", 180, learns(mode, ranks, {}))
        for ranks in (2, 4) for mode in sorted(set(MODES) - {"single"}, key=lambda mode: (mode not in CHOICES, mode))
    ),
]  # fmt: skip
