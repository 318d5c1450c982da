"""A run on the virtual hosts of scripts/netlab: its log lines with their times, and access to its processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

from prepare import ROOT

CONFIG = "configs/multi30k-tiny.yml"
LAB, NAMESPACE = ROOT / "scripts" / "netlab", "nmtlab"
HOSTS_FILE = "/run/nmt-netlab/hosts"
LONGEST = 300.0  # maximum seconds to wait for an event


class NotSeen(Exception):
    """An expected event did not happen."""


class Job:
    """A run on the virtual hosts, and its log lines with their times."""

    def __init__(self, folder: Path, mode: str, hosts: int, vocabulary: Path, options: dict[str, str]) -> None:
        self.folder, self.hosts, self._mode, self._vocabulary, self._options = folder, hosts, mode, vocabulary, options
        self.lines: list[tuple[float, str]] = []
        self.fault = 0.0  # the time of the fault
        self.start("--overwrite")

    def start(self, *more: str) -> None:
        settings = {
            "config": CONFIG, "run": self.folder, "mode": self._mode, "corpus.vocabulary.path": self._vocabulary,
            "batch.tokens": 1024, "optimizer.warmup": 100, "optimizer.smoothing": 0, "validation.metrics": "[cross-entropy]",
            "validation.every": "60Kt", "checkpoint.every": "20u", "stop.after": "120Kt", "stop.patience": 0,
            "log.every": "5u", "recovery.every": "20u", "transport.deadline": 10, "threads": 1, "hosts": HOSTS_FILE,
            "restarts": 5, } | self._options  # fmt: skip
        arguments = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        command = [str(LAB), "run", "--", "nmt-train", *arguments, *more]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace")
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        with open(self.folder.with_suffix(".log"), "a", encoding="utf-8") as log:
            for line in self.process.stderr:
                self.lines.append((time.monotonic(), line.rstrip()))
                print(line, end="", file=log, flush=True)

    def wait(self, pattern: str, after: float = 0.0, count: int = 1) -> float:
        """Wait for the count-th line after the time `after` that matches `pattern`; return its time."""
        end = time.monotonic() + LONGEST
        while time.monotonic() < end:
            found = [at for at, line in list(self.lines) if at > after and re.search(pattern, line)]
            if len(found) >= count:
                return found[count - 1]
            if self.process.poll() is not None and not re.search(pattern, " ".join(line for _, line in self.lines)):
                break
            time.sleep(0.02)
        said = "\n".join(line for _, line in self.lines[-15:])
        raise NotSeen(f"{self.folder.name}: no line matched {pattern!r}; the last lines:\n{said}")

    def trains(self) -> None:
        """Wait until the run has logged some updates and written a checkpoint."""
        self.wait(r"Up\. \d+ : Sen", count=5)
        end = time.monotonic() + LONGEST
        while time.monotonic() < end and not any((self.folder / "checkpoints").glob("[0-9]*")):
            time.sleep(0.05)

    def pids(self, host: int) -> list[int]:
        done = subprocess.run(["ip", "netns", "pids", f"{NAMESPACE}{host}"], capture_output=True, text=True, check=True)
        return [int(pid) for pid in done.stdout.split()]

    def process_of(self, host: int, what: bytes) -> int:
        """The newest process of a host (counted from 1) whose command line contains `what`."""
        for pid in sorted(self.pids(host), reverse=True):
            try:
                if what in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
            except OSError:
                continue
        raise NotSeen(f"{self.folder.name}: no {what.decode()} on host {host}")

    def send(self, number: signal.Signals, *hosts: int, what: bytes = b"nmt_train.cli.train") -> None:
        """Send a signal to the ranks of some hosts, and set the time of the fault."""
        doomed = [self.process_of(host, what) for host in hosts]
        self.fault = time.monotonic()
        for pid in doomed:
            os.kill(pid, number)

    def link(self, host: int, state: str) -> None:
        subprocess.run([str(LAB), "link", str(host), state], check=True)

    def update(self, before: float) -> int:
        """The last update that was logged before a time."""
        said = [re.search(r"Up\. (\d+) : Sen", line) for at, line in self.lines if at < before]
        return max((int(match[1]) for match in said if match), default=0)
