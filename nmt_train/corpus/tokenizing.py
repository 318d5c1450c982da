"""Tokenizes text in several processes, in order. Run as a program, it is one of these processes.

A request is a side and lines; the answer is the number of pieces of each line, the ids of all, and what the vocabulary lacks
(JSON). All are blocks of bytes that follow their length.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from nmt_train.common import container
from nmt_train.common.errors import TRY_AGAIN, UserError
from nmt_train.corpus.unknown import UnknownCharacters
from nmt_train.corpus.vocabulary import SOURCE, TARGET, Vocabulary

_AHEAD = 2  # requests for each process: one that it works on, and one that waits
_LENGTH = struct.Struct("<Q")
Chunk = Sequence[tuple[str, str]]


class Ids(NamedTuple):
    """The pieces of some lines: their number in each line (lines,), int64, the ids of all (pieces,), and what is unknown."""

    lengths: np.ndarray
    tokens: np.ndarray
    unknown: UnknownCharacters


class ProcessEnded(UserError):
    """A process that tokenizes has ended, perhaps because the machine has no more memory."""

    status = TRY_AGAIN


def cores() -> int:
    """How many processes can tokenize at the same time here."""
    return max(1, min(len(os.sched_getaffinity(0)), math.ceil(min(container.cores(), 1e6))))


def encode(vocabulary: Vocabulary, lines: Sequence[str], side: int, dtype: np.dtype) -> Ids:
    """Tokenize lines in this process."""
    ids = vocabulary.encode(lines, side)
    unknown = UnknownCharacters()
    unknown.add(lines, ids, vocabulary, side)
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return Ids(lengths, np.fromiter((i for line in ids for i in line), dtype, int(lengths.sum())), unknown)


def tokenized(vocabulary: Vocabulary, chunks: Iterable[Chunk], dtype: np.dtype, processes: int) -> Iterator[tuple[Ids, Ids]]:
    """Yield the pieces of the sources and of the targets of each chunk of pairs, in order.

    processes: how many others to start; 0: tokenize in this one. Raises ProcessEnded.
    """
    if not processes:
        for chunk in chunks:
            source, target = (encode(vocabulary, [pair[side] for pair in chunk], side, dtype) for side in (SOURCE, TARGET))
            yield source, target
        return
    idle = queue.SimpleQueue[_Process]()
    with ExitStack() as opened:
        for _ in range(processes):
            idle.put(opened.enter_context(_Process(vocabulary, dtype)))
        pool = opened.enter_context(ThreadPoolExecutor(processes))  # each thread waits for one process

        def ask(side: int, lines: list[str]) -> Ids:
            process = idle.get()
            try:
                return process.ask(side, lines)
            finally:
                idle.put(process)

        asked = deque[tuple[Future[Ids], Future[Ids]]]()
        for chunk in chunks:
            asked.append(
                (pool.submit(ask, SOURCE, [pair[0] for pair in chunk]), pool.submit(ask, TARGET, [pair[1] for pair in chunk]))
            )
            if len(asked) > _AHEAD * processes:
                yield _answers(asked.popleft())
        yield from map(_answers, asked)


def _answers(asked: tuple[Future[Ids], Future[Ids]]) -> tuple[Ids, Ids]:
    return asked[0].result(), asked[1].result()


class _Process:
    """A process that tokenizes. It ends when its input ends."""

    def __init__(self, vocabulary: Vocabulary, dtype: np.dtype) -> None:
        self._dtype = dtype
        above = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [above, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, dtype.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._send(vocabulary.model)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()  # it holds nothing that could be lost
        self._process.communicate()

    def ask(self, side: int, lines: Sequence[str]) -> Ids:
        """Tokenize lines of a side there."""
        self._send(bytes([side]) + "\n".join(lines).encode())
        lengths, tokens, unknown = (_read(self._output) for _ in range(3))
        if lengths is None or tokens is None or unknown is None:
            raise self._ended()
        unknowns = UnknownCharacters(json.loads(unknown))
        return Ids(np.frombuffer(lengths, np.int64), np.frombuffer(tokens, self._dtype), unknowns)

    def _send(self, block: bytes) -> None:
        try:
            _write(self._input, block)
        except BrokenPipeError:
            raise self._ended() from None

    def _ended(self) -> ProcessEnded:
        return ProcessEnded(
            f"corpus: a process that tokenizes has ended with status {self._process.wait()}; check whether this machine has"
            " enough memory, then start the same command again"
        )


def _write(stream: IO[bytes], block: bytes) -> None:
    stream.write(_LENGTH.pack(len(block)) + block)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    """The next block, or None if there is none."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    block = stream.read(_LENGTH.unpack(head)[0])
    return block if len(block) == _LENGTH.unpack(head)[0] else None


def serve(requests: IO[bytes], answers: IO[bytes], dtype: np.dtype) -> None:
    """Answer requests until there are no more. The first block is the vocabulary."""
    model = _read(requests)
    if model is None:
        return
    vocabulary = Vocabulary.read(model, "the vocabulary of the run")
    vocabulary.threads = 1  # every process has one core
    while (request := _read(requests)) is not None:
        ids = encode(vocabulary, request[1:].decode().split("\n"), request[0], dtype)
        _write(answers, ids.lengths.tobytes())
        _write(answers, ids.tokens.tobytes())
        _write(answers, json.dumps({"lines": ids.unknown.lines, "characters": ids.unknown.characters}).encode())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C concerns the process that asks
    serve(sys.stdin.buffer, sys.stdout.buffer, np.dtype(sys.argv[1]))
