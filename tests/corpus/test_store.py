from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nmt_train import cli
from nmt_train.cli import train
from nmt_train.common.errors import UserError
from nmt_train.corpus import CorpusConfig, CorpusPart, build_store, cache
from nmt_train.corpus import store as store_module
from nmt_train.corpus.store import Store, open_store, open_stores
from nmt_train.corpus.vocabulary import Vocabulary


@pytest.fixture
def files(demo: Path, tmp_path: Path) -> list[str]:
    """A corpus of its own folder, with empty lines on either side."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for language, empty in (("en", 3), ("de", 5)):
        lines = (demo / f"train.{language}").read_text(encoding="utf-8").splitlines()[:200]
        lines[empty] = ""
        (folder / f"train.{language}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return [str(folder / "train.en"), str(folder / "train.de")]


def lines_of(store: Store, vocabulary: Vocabulary) -> list[list[str]]:
    return [vocabulary.decode([side[i].tolist() for i in range(len(store))]) for side in (store.source, store.target)]


def test_the_store_holds_the_text(
    files: list[str], vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_store, "_CHUNK", 7)  # many chunks, and an unfinished last one
    store = open_store(CorpusPart(files=files), "corpus.train", vocabulary, [tmp_path])
    assert lines_of(store, vocabulary) == [Path(path).read_text(encoding="utf-8").splitlines() for path in files]
    assert store.source.lengths[3] == 0
    assert store.target.lengths[5] == 0
    assert store.source.tokens.dtype == np.uint16


def test_it_is_reused_when_nothing_changed_and_made_again_when_text_or_vocabulary_did(
    files: list[str], vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_store(CorpusPart(files=files), "corpus.train", vocabulary, [tmp_path])
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "build_store", lambda *arguments: pytest.fail("built again"))
        assert open_store(CorpusPart(files=files), "corpus.train", vocabulary, [tmp_path]).path == first.path
    changed = Path(files[1])
    before = changed.stat()
    changed.write_text(changed.read_text(encoding="utf-8").replace("zwei", "drei"), encoding="utf-8")
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert changed.stat().st_size == before.st_size
    second = open_store(CorpusPart(files=files), "corpus.train", vocabulary, [tmp_path])
    assert second.path != first.path
    assert second.checksum != first.checksum
    assert lines_of(second, vocabulary)[1] == changed.read_text(encoding="utf-8").splitlines()


def test_it_is_reused_for_the_same_text_elsewhere(
    files: list[str], vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_store(CorpusPart(files=files), "corpus.train", vocabulary, [tmp_path])
    moved = [shutil.move(path, tmp_path / Path(path).name) for path in files]
    monkeypatch.setattr(store_module, "build_store", lambda *arguments: pytest.fail("built again"))
    assert open_store(CorpusPart(files=[*map(str, moved)]), "corpus.train", vocabulary, [tmp_path]).path == first.path


def test_a_change_anywhere_in_a_large_file_is_a_new_corpus(
    files: list[str], vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all of a large file is read to identify it; a change between the blocks that are read has another time."""
    for name, value in (("_WHOLE", 1000), ("_BLOCK", 10), ("_BLOCKS", 4)):
        monkeypatch.setattr(cache, name, value)
    path, before = Path(files[0]), os.stat(files[0])
    data, size = path.read_bytes(), os.stat(files[0]).st_size
    stores = {open_store(CorpusPart(files=files), "corpus.train", vocabulary, [tmp_path]).path}
    for place, keeps_time in ((size - 2, True), (20, False)):
        path.write_bytes(data[:place] + b"x" + data[place + 1 :])
        if keeps_time:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        stores.add(open_store(CorpusPart(files=files), "corpus.train", vocabulary, [tmp_path]).path)
    assert len(stores) == 3


def test_where_the_cache_cannot_be_written_it_goes_to_the_run_folder(
    files: list[str], vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder, refused = Path.mkdir, [tmp_path / "cache"]

    def refuse(folder: Path, *arguments: Any, **options: Any) -> None:
        if folder.parent in refused or folder in refused:
            raise PermissionError(13, "denied")
        make_folder(folder, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    store = open_store(CorpusPart(files=files), "corpus.train", vocabulary, [tmp_path / "cache", tmp_path / "run"])
    assert store.path.parent == tmp_path / "run"
    refused.append(tmp_path / "other")
    Path(files[0]).write_text("other text\n" * 200, encoding="utf-8")
    with pytest.raises(UserError, match="denied"):
        open_store(CorpusPart(files=files), "corpus.train", vocabulary, [tmp_path / "cache", tmp_path / "other"])


def test_also_where_the_cache_cannot_even_be_read(files: list[str], vocabulary: Vocabulary, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = CorpusConfig(train=files, valid=files, cache=str(tmp_path / "file" / "cache"))
    assert open_stores(config, vocabulary, tmp_path / "run").paths[0].parent == tmp_path / "run"


@pytest.mark.slow
def test_many_corpora_keep_one_file_open_each_and_are_not_read_into_memory(
    files: list[str], vocabulary: Vocabulary, tmp_path: Path
) -> None:
    part = CorpusPart(files=files)
    open_store(part, "corpus.train", vocabulary, [tmp_path])
    before = len(os.listdir("/proc/self/fd"))
    stores = [open_store(part, "corpus.train", vocabulary, [tmp_path]) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before + 5
    mapped = Path("/proc/self/maps").read_text()
    assert mapped.count(f"{stores[0].path}/source.tokens") >= 5
    with pytest.raises(ValueError, match="read-only"):
        stores[0].source.tokens[0] = 1
    tokens = stores[0].source.tokens
    del stores
    assert tokens.sum() > 0, "an array keeps its memory"
    gc.collect()
    assert Path("/proc/self/maps").read_text().count("source.tokens") < mapped.count("source.tokens")


OPENING = """
import sys
from pathlib import Path
from nmt_train import cli
from nmt_train.corpus import CorpusConfig
from nmt_train.corpus.store import open_stores
from nmt_train.corpus.vocabulary import Vocabulary
files, model, cache = sys.argv[1:3], sys.argv[3], sys.argv[4]
def command(arguments):
    parts = [{"name": f"c{number}", "files": files} for number in range(60)]
    stores = open_stores(CorpusConfig(train=parts, valid=files, cache=cache), Vocabulary.load(model), Path(cache))
    return 0
sys.exit(cli.run(command, []))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("hard", "status"), [(4096, 0), (50, 2)])
def test_the_limit_of_open_files_is_raised_and_named_if_that_is_not_enough(
    hard: int, status: int, files: list[str], vocabulary: Vocabulary, tmp_path: Path
) -> None:
    (tmp_path / "model").write_bytes(vocabulary.model)
    limited = ["bash", "-c", f'ulimit -n {hard}; ulimit -Sn 50; exec "$@"', "bash", sys.executable, "-c", OPENING]
    arguments = [*limited, *files, str(tmp_path / "model"), str(tmp_path / "cache")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    told = "Too many open files; raise the limit of open files per process (`ulimit -n`)" in done.stderr
    assert told == bool(status)


def test_without_a_home_folder_it_goes_to_the_run_folder(
    files: list[str], vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", unknown)
    config = CorpusConfig(train=files, valid=files)
    assert open_stores(config, vocabulary, tmp_path / "run").paths[0].parent == tmp_path / "run"
    assert cli.run(train.command, ["--empty-cache"]) == 2


def test_its_folder_follows_the_umask(files: list[str], vocabulary: Vocabulary, tmp_path: Path) -> None:
    before = os.umask(0o007)
    try:
        path = open_store(CorpusPart(files=files), "corpus.train", vocabulary, [tmp_path]).path
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o777 for each in (path, path / "store.json")] == [0o770, 0o660]


def test_two_runs_may_build_it_at_once(
    files: list[str], vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_have_built, build = threading.Barrier(2), store_module.build_store

    def build_and_wait(*arguments: object) -> None:
        build(*arguments)  # type: ignore[arg-type]
        both_have_built.wait(timeout=30)

    monkeypatch.setattr(store_module, "build_store", build_and_wait)
    stores: list[Store] = []
    threads = [
        threading.Thread(
            target=lambda: stores.append(open_store(CorpusPart(files=files), "corpus.train", vocabulary, [tmp_path]))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stores[0].path == stores[1].path
    assert lines_of(stores[0], vocabulary) == lines_of(stores[1], vocabulary)
    assert list(stores[0].path.parent.glob("*.store*")) == [stores[0].path], "nothing half-made stays behind"
    assert not list(stores[0].path.parent.glob(".*"))


def test_a_build_that_fails_leaves_nothing_behind(files: list[str], vocabulary: Vocabulary, tmp_path: Path) -> None:
    with open(files[1], "ab") as file:
        file.write(b"\xff\n")
    with pytest.raises(UserError, match="line 201: not UTF-8"):
        open_store(CorpusPart(files=files), "corpus.train", vocabulary, [tmp_path])
    assert [path.name for path in tmp_path.iterdir() if "store" in path.name] == []


def test_a_damaged_store_is_named(files: list[str], vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = open_store(CorpusPart(files=files), "corpus.train", vocabulary, [tmp_path]).path
    for name, data in (("target.tokens", b"12"), ("store.json", b"{")):
        (path / name).write_bytes(data)
        with pytest.raises(UserError, match=rf"{path.name}: damaged .*; delete this folder"):
            open_store(CorpusPart(files=files), "corpus.train", vocabulary, [tmp_path])


@pytest.mark.parametrize(("source", "target", "what"), [("", "", "files are"), ("\n\n", "a\nb\n", "source side is")])
def test_empty_text_is_refused(tmp_path: Path, vocabulary: Vocabulary, source: str, target: str, what: str) -> None:
    for name, text in (("a", source), ("b", target)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=f"corpus.train: the {what} empty"):
        open_store(CorpusPart(files=[str(tmp_path / "a"), str(tmp_path / "b")]), "corpus.train", vocabulary, [tmp_path])
