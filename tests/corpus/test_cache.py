"""The folder of tokenized corpora: what is used stays, what was used longest ago goes first."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Make

from nmt_train.cli import train
from nmt_train.corpus import cache, store
from nmt_train.corpus.vocabulary import Vocabulary


def stored(folder: Path, name: str, size: int, used: int) -> Path:
    """A complete store of `size` bytes in all that was used at this time."""
    path = folder / f"{name}{cache.SUFFIX}"
    path.mkdir(parents=True)
    (path / "tokens").write_bytes(b"x" * (size - 2))
    (path / cache.READY).write_text("{}")
    os.utime(path / cache.READY, (used, used))
    return path


def test_it_is_in_the_users_cache_folder_unless_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.folder(None) == Path("/somewhere/nmt_train")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder(None) == tmp_path / ".cache" / "nmt_train"
    assert cache.folder("~/mine") == tmp_path / "mine"


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    paths = [stored(tmp_path, name, 100, used) for name, used in (("a", 30), ("b", 10), ("c", 20))]
    cache.make_room(tmp_path, 300)
    assert all(path.exists() for path in paths)
    cache.make_room(tmp_path, 150)
    assert [path.exists() for path in paths] == [True, False, False]


@pytest.mark.parametrize(("free", "coming", "left"), [(1000, 0, 3), (100, 0, 2), (100, 100, 1), (0, 0, 1)])
def test_the_cache_has_at_most_half_of_the_space_that_is_free_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, coming: int, left: int
) -> None:
    for used in range(3):
        stored(tmp_path, str(used), 100, used)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    cache.make_room(tmp_path, 1e9, coming)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"{used}.store" for used in range(3 - left, 3)]


def test_there_is_room_before_a_corpus_is_tokenized(
    make: Make, vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = stored(tmp_path, "old", 100, 1)
    free = sum(os.stat(path).st_size for path in make().corpus.train) * 2  # for the new store only
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    build, seen = store.build_store, list[bool]()
    monkeypatch.setattr(store, "build_store", lambda *arguments: (seen.append(old.exists()), build(*arguments)))
    store.open_stores(make(corpus__cache=str(tmp_path)).corpus, vocabulary, tmp_path)
    assert seen == [False]


def test_what_a_process_uses_stays_and_counts_as_used_now(tmp_path: Path) -> None:
    old, new = stored(tmp_path, "old", 100, 1), stored(tmp_path, "new", 100, 2)
    with cache.hold(old):
        assert (old / cache.READY).stat().st_mtime > 1000
        assert cache.empty(tmp_path) == (1, 100)
        assert (old.exists(), new.exists()) == (True, False)
    assert cache.empty(tmp_path) == (1, 100)


def test_a_store_that_another_process_is_removing_is_as_good_as_gone(tmp_path: Path) -> None:
    store = stored(tmp_path, "a", 100, 1)
    with open(store / cache.READY, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(FileNotFoundError):
            cache.hold(store)


def test_only_complete_stores_are_touched(tmp_path: Path) -> None:
    (tmp_path / ".half.store.123").mkdir()
    (tmp_path / "mine").write_text("x")
    assert cache.empty(tmp_path) == (0, 0)
    assert cache.empty(tmp_path / "nowhere") == (0, 0)
    assert len(list(tmp_path.iterdir())) == 2


def test_what_a_killed_process_has_left_of_a_removal_is_in_nobodys_way(tmp_path: Path) -> None:
    store = stored(tmp_path, "a", 100, 1)
    (tmp_path / f".{store.name}.removed").mkdir()
    (tmp_path / f".{store.name}.removed" / "tokens").write_text("x")
    assert cache.empty(tmp_path) == (1, 100)
    assert not list(tmp_path.iterdir())


def test_a_command_empties_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path, "a", 100, 1)
    assert train.command(["--empty-cache", "--corpus.cache", str(tmp_path)]) == 0
    assert "tokenized corpora and vocabularies removed: 1, 0.00 GB" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_killed_processes_left_behind_is_removed_after_a_day(tmp_path: Path) -> None:
    for name, age in ((".a.store.1234", 100_000), (".b.store.5678", 10), (".c.store.removed", 100_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "source.tokens").write_bytes(b"x")
        for path in (tmp_path / name / "source.tokens", tmp_path / name):
            os.utime(path, (time.time() - age,) * 2)
    cache.make_room(tmp_path, 10**9)
    assert [path.name for path in tmp_path.iterdir()] == [".b.store.5678"]
