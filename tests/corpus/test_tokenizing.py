"""Several processes tokenize as one does, in order; if one ends, a sentence says so."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nmt_train.common.errors import TRY_AGAIN
from nmt_train.corpus import CorpusPart, build_store, pass_bar, tokenizing
from nmt_train.corpus.pass_bar import PassBar
from nmt_train.corpus.store import open_store
from nmt_train.corpus.text import read_pairs
from nmt_train.corpus.tokenizing import ProcessEnded, tokenized
from nmt_train.corpus.vocabulary import Vocabulary

SMALL = np.dtype(np.uint16)


def chunks(demo: Path, size: int = 50) -> list[list[tuple[str, str]]]:
    pairs = [*read_pairs([f"{demo}/train.en", f"{demo}/train.de"], "corpus.train"), ("", "leer"), ("", ""), ("one ж", "eins")]
    return [pairs[start : start + size] for start in range(0, len(pairs), size)]


@pytest.mark.slow
def test_two_processes_give_the_pieces_of_one_in_the_same_order(demo: Path, vocabulary: Vocabulary) -> None:
    alone, together = (list(tokenized(vocabulary, chunks(demo), SMALL, processes)) for processes in (0, 2))
    assert len(alone) == len(together) == 13
    assert alone[-1][0].unknown.facts == {"lines": 1, "characters": {"ж": 1}}
    for one, other in zip(alone, together, strict=True):
        for side, same in zip(one, other, strict=True):
            assert np.array_equal(side.lengths, same.lengths)
            assert np.array_equal(side.tokens, same.tokens)
            assert side.unknown.facts == same.unknown.facts
            assert side.tokens.dtype == same.tokens.dtype == SMALL


@pytest.mark.slow
def test_a_store_is_the_same_whoever_tokenizes(
    demo: Path, vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = CorpusPart(files=[f"{demo}/train.en", f"{demo}/train.de"])
    monkeypatch.setattr(build_store, "_CHUNK", 100)
    alone = open_store(part, "corpus.train", vocabulary, [tmp_path / "alone"])
    monkeypatch.setattr(build_store, "_MANY", 1)
    together = open_store(part, "corpus.train", vocabulary, [tmp_path / "together"], prepare=lambda: 600)
    assert together.checksum == alone.checksum


@pytest.mark.slow
def test_a_process_that_ends_is_an_error_after_which_a_restart_may_help(
    demo: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[tokenizing._Process] = []
    original = tokenizing._Process.__enter__
    monkeypatch.setattr(tokenizing._Process, "__enter__", lambda self: processes.append(self) or original(self))

    def ends() -> Iterator[list[tuple[str, str]]]:
        for number, chunk in enumerate(chunks(demo)):
            if number == 5:
                processes[0]._process.kill()
            yield chunk

    with pytest.raises(
        ProcessEnded, match="a process that tokenizes has ended with status -9; check whether .* memory"
    ) as error:
        list(tokenized(vocabulary, ends(), SMALL, 1))
    assert error.value.status == TRY_AGAIN
    assert processes[0]._process.returncode == -9


def test_a_process_ends_with_its_input(vocabulary: Vocabulary) -> None:
    answers = io.BytesIO()
    tokenizing.serve(io.BytesIO(), answers, SMALL)
    tokenizing.serve(io.BytesIO(b"\x05"), answers, SMALL)
    assert answers.getvalue() == b""


def test_without_a_terminal_a_line_from_time_to_time_says_how_long_it_will_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 30.0, 61.0, 100.0, 200.0])
    monkeypatch.setattr(pass_bar.time, "monotonic", lambda: next(now))
    with PassBar("tokenizing corpus.train", 1000) as bar:
        for _ in range(4):
            bar.advance(200)
    assert capsys.readouterr().err.splitlines() == [
        "nmt-train: tokenizing corpus.train: 40%, 1:32 left", "nmt-train: tokenizing corpus.train: 80%, 0:50 left",
    ]  # fmt: skip
    now = iter([0.0, 70.0])
    with PassBar("reading corpus.train") as bar:
        bar.advance(12_000)
    assert capsys.readouterr().err == "nmt-train: reading corpus.train: 12,000 pairs\n"
