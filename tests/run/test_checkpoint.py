from __future__ import annotations

import builtins
import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nmt_train.common import atomic_file as durable
from nmt_train.common.errors import TRY_AGAIN, UserError
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.run import checkpoint
from nmt_train.run.folder import Run, is_simulation, run_of
from nmt_train.run.log import rewind_metrics

REMOVE = shutil.rmtree
TENSORS = {"parameters": {"weight": torch.arange(6.0).view(2, 3)}, "random": {"cpu": torch.get_rng_state()}}


class Killed(BaseException):
    """The process dies here: nothing after this point runs, not even handlers of ordinary exceptions."""


def save(path: Path, vocabulary: Vocabulary, number: int = 0) -> None:
    checkpoint.save(path, TENSORS, {"progress": {"updates": number}}, vocabulary)


def test_what_was_saved_is_loaded(tmp_path: Path, vocabulary: Vocabulary) -> None:
    save(tmp_path / "5", vocabulary, 5)
    loaded = checkpoint.load(tmp_path / "5")
    assert torch.equal(loaded.tensors("parameters")["weight"], TENSORS["parameters"]["weight"])
    assert torch.equal(loaded.tensors("random")["cpu"], TENSORS["random"]["cpu"])
    assert loaded.facts["progress"] == {"updates": 5}
    assert loaded.vocabulary().digest == vocabulary.digest == loaded.facts["vocabulary"]
    with pytest.raises(UserError, match="holds no smoothed"):
        loaded.tensors("smoothed")


def test_a_file_with_values_that_never_arrived_is_no_checkpoint(tmp_path: Path, vocabulary: Vocabulary) -> None:
    with pytest.raises(RuntimeError, match="12 bytes too few"), checkpoint.draft(tmp_path / "5", vocabulary) as draft:
        draft.create("parameters", {"weight": (torch.float32, (2, 3))}).write("weight", torch.ones(3))
        draft.finish({})
    assert not (tmp_path / "5").exists()


def test_a_checkpoint_is_loaded_from_a_path_that_is_not_utf8(tmp_path: Path, vocabulary: Vocabulary) -> None:
    save(tmp_path / "5", vocabulary, 5)
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    (tmp_path / "5").rename(odd)
    assert torch.equal(checkpoint.load(odd).tensors("parameters")["weight"], TENSORS["parameters"]["weight"])


def test_every_file_of_a_checkpoint_follows_the_umask(tmp_path: Path, vocabulary: Vocabulary) -> None:
    before = os.umask(0o027)
    try:
        save(tmp_path / "5", vocabulary)
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in (tmp_path / "5").iterdir()} == dict.fromkeys(
        ("checkpoint.json", "parameters.safetensors", "random.safetensors", "vocabulary.model"), oct(0o640)
    )


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: durable.write(folder / "file", b"new\n"),
        lambda folder: rewind_metrics(folder / "metrics.jsonl", 5),
        lambda folder: Run(folder).begin("new", b"new"),
        lambda folder: Run(folder).keep_translations(5, ["new"]),
        lambda folder: Run(folder).link("last", folder / "checkpoints" / "5"),
    ],
    ids=["any file", "metrics", "config and vocabulary", "translations", "a link"],
)
def test_a_file_is_on_the_disk_before_it_takes_its_place_and_then_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "update": 9}\n', encoding="utf-8")
    done: list[tuple[str, str]] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append(("synced", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def replaced(beside: Path, path: Path) -> Path:
        if not beside.is_symlink():
            assert done[-1] == ("synced", beside.name)
        done.append(("replaced", path.parent.name))
        return replace(beside, path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write(tmp_path)
    assert any(what == "replaced" for what, _ in done)
    for (what, name), after in zip(done, [*done[1:], ("nothing", "")], strict=True):
        assert what == "synced" or after == ("synced", name)
    assert not list(tmp_path.rglob("*.tmp"))


def interruptions(monkeypatch: pytest.MonkeyPatch, after: int, error: Callable[[], BaseException]) -> None:
    """Let every call that touches the disk pass until `after` of them have, then fail."""
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise error()
            return real(*arguments, **options)

        return call

    monkeypatch.setattr(os, "pwrite", counted(os.pwrite))
    for name in ("fsync",):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for name in ("write_bytes", "write_text", "rename", "mkdir"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(checkpoint.shutil, "rmtree", counted(checkpoint.shutil.rmtree))


@pytest.mark.parametrize("same_update", [False, True])
def test_death_at_any_moment_of_a_save_leaves_the_last_good_checkpoint(
    tmp_path: Path, vocabulary: Vocabulary, same_update: bool
) -> None:
    for after in range(100):
        run = Run.open(tmp_path / str(after))
        save(run.checkpoint(10), vocabulary, 10)
        with pytest.MonkeyPatch.context() as patch:
            interruptions(patch, after, Killed)
            try:
                save(run.checkpoint(10 if same_update else 20), vocabulary, 20)
                finished = True
            except Killed:
                finished = False
        run.close()
        survivor = Run.open(tmp_path / str(after))
        last = survivor.last()
        assert last is not None
        updates = checkpoint.load(last).facts["progress"]["updates"]
        assert updates == 20 if finished else updates in (10, 20)
        assert [path.name for path in (survivor.folder / "checkpoints").glob(".*")] == [], "leftovers are cleaned up"
        survivor.close()
        if finished:
            assert after > 10, "the loop went through every moment"
            return
    pytest.fail("a save takes fewer steps than that")


@pytest.mark.parametrize("update", [10, 20])
def test_a_full_disk_at_any_moment_is_one_sentence_and_leaves_the_last_good_checkpoint(
    tmp_path: Path, vocabulary: Vocabulary, update: int
) -> None:
    def full() -> OSError:
        return OSError(errno.ENOSPC, "No space left on device")

    for after in range(1, 100):
        folder = tmp_path / str(after)
        save(folder / "10", vocabulary, 10)
        with pytest.MonkeyPatch.context() as patch:
            interruptions(patch, after, full)
            patch.setattr(checkpoint.shutil, "rmtree", REMOVE)  # removing works on a full disk
            try:
                save(folder / str(update), vocabulary, 20)
                return
            except UserError as error:
                assert f"{update}: the checkpoint could not be written: No space left on device" in str(error)
        checkpoint.clean(folder)  # as the next start does
        assert checkpoint.load(folder / "10").facts["progress"]["updates"] in ((10,) if update == 20 else (10, 20))
        assert not list(folder.glob(".*.tmp"))


@pytest.mark.parametrize("file", ["parameters.safetensors", "vocabulary.model"])
def test_truncated_changed_and_missing_files_are_named(tmp_path: Path, vocabulary: Vocabulary, file: str) -> None:
    save(tmp_path / "5", vocabulary)
    path = tmp_path / "5" / file
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    with pytest.raises(UserError, match=rf"{file}: has {len(data) - 3} bytes instead of {len(data)}"):
        checkpoint.load(tmp_path / "5")
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(UserError, match=f"{file}: was changed since it was saved"):
        checkpoint.load(tmp_path / "5")
    path.unlink()
    with pytest.raises(UserError, match=f"{file}: No such file"):
        checkpoint.load(tmp_path / "5")


@pytest.mark.parametrize(
    "manifest", ["", "[]", "{", '{"format": 99, "files": {}}', '{"format": 1}', '{"format": 1, "files": {"../../x": {}}}']
)
def test_a_damaged_manifest_is_named(tmp_path: Path, vocabulary: Vocabulary, manifest: str) -> None:
    save(tmp_path / "5", vocabulary)
    (tmp_path / "5" / "checkpoint.json").write_text(manifest, encoding="utf-8")
    with pytest.raises(UserError, match=str(tmp_path / "5")):
        checkpoint.load(tmp_path / "5")
    with pytest.raises(UserError, match="no checkpoint here"):
        checkpoint.load(tmp_path / "6")


def test_loading_runs_no_code(tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "5", vocabulary)
    for module, name in ((torch, "load"), (__import__("pickle"), "loads"), (__import__("pickle"), "load"), (builtins, "eval")):
        monkeypatch.setattr(module, name, lambda *arguments, **options: pytest.fail("code could have run"))
    loaded = checkpoint.load(tmp_path / "5")
    loaded.tensors("parameters")
    files = {path.suffix for path in (tmp_path / "5").iterdir()}
    assert files == {".safetensors", ".json", ".model"}
    json.loads((tmp_path / "5" / "checkpoint.json").read_text(encoding="utf-8"))


def test_pruning_keeps_the_newest_and_whatever_a_link_names(tmp_path: Path, vocabulary: Vocabulary) -> None:
    run = Run.open(tmp_path / "run")
    for update in (1, 2, 3, 4, 10):
        save(run.checkpoint(update), vocabulary, update)
    run.link("best-bleu", run.checkpoint(2))
    run.link("last", run.checkpoint(10))
    run.prune(keep=2)
    assert [path.name for path in run.checkpoints()] == ["2", "4", "10"]
    run.link("best-bleu", run.checkpoint(10))
    run.prune(keep=2)
    assert [path.name for path in run.checkpoints()] == ["4", "10"]
    assert (run.folder / "best-bleu").resolve() == run.checkpoint(10).resolve()


def test_a_run_folder_in_use_is_refused_naming_the_process(tmp_path: Path) -> None:
    first = Run.open(tmp_path / "run")
    with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on "):
        Run.open(tmp_path / "run")
    first.close()
    Run.open(tmp_path / "run").close()


def test_a_job_that_is_started_again_waits_for_the_lock_of_a_machine_that_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = Run.open(tmp_path / "run")
    looks = iter([lambda: None, lambda: None, lost.close])
    monkeypatch.setattr("nmt_train.run.folder.time.sleep", lambda seconds: next(looks)())
    Run.open(tmp_path / "run", patient=True).close()
    said = capsys.readouterr().err
    assert re.fullmatch(r"nmt-train: run: \S+ is in use by process \d+ on \S+: waiting for it for up to 300 s\n", said)


def test_a_file_system_without_locks_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("nmt_train.run.folder.fcntl.flock", flock)
    Run.open(tmp_path / "run").close()
    assert re.search(r"warning: run: .*run cannot be locked \(No locks available\): do not use", capsys.readouterr().err)


def test_what_was_only_timed_is_no_simulation_once_it_was_trained(tmp_path: Path) -> None:
    (tmp_path / "timing.json").write_text("{}")
    assert is_simulation(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert not is_simulation(tmp_path)


def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("nmt_train.common.atomic_file.os.fsync", fsync)
    with pytest.raises(OSError, match="No space left") as full:
        durable.write(tmp_path / "translations.txt", b"text")
    assert full.value.filename == str(tmp_path / "translations.txt")
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_never_let_go_of_is_to_be_tried_again_by_another_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmt_train.run.folder.time.sleep", lambda seconds: None)
    holder = Run.open(tmp_path / "run")
    with pytest.raises(UserError, match="in use by process .*, still after 300 s; .* start the same command again") as refused:
        Run.open(tmp_path / "run", patient=True)
    assert refused.value.status == TRY_AGAIN
    holder.close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run: .*Not a directory; check the path, or choose another folder"):
        Run.open(tmp_path / "file" / "run")


def test_a_run_that_was_copied_without_its_links_is_refused_before_it_trains(tmp_path: Path, vocabulary: Vocabulary) -> None:
    run = Run.open(tmp_path / "run")
    save(run.checkpoint(1), vocabulary, 1)
    run.link("last", run.checkpoint(1))
    run.close()
    shutil.copytree(run.folder, tmp_path / "copy")
    with pytest.raises(UserError, match=r"copy/last is a folder instead of a link, .*; remove it: the checkpoints are in"):
        Run.open(tmp_path / "copy")


def test_overwriting_leaves_the_users_own_links(tmp_path: Path, vocabulary: Vocabulary) -> None:
    big, run = tmp_path / "big", Run.open(tmp_path / "run")
    run.close()
    (run.folder / "checkpoints").rmdir()
    big.mkdir()
    (run.folder / "checkpoints").symlink_to(big)
    (run.folder / "data").symlink_to(tmp_path)
    (tmp_path / "texts").mkdir()
    (run.folder / "translations").symlink_to(tmp_path / "texts")
    run = Run.open(run.folder)
    save(run.checkpoint(1), vocabulary, 1)
    run.keep_translations("1", ["a line"])
    run.link("last", run.checkpoint(1))
    (tmp_path / "mine").symlink_to(run.folder / "last")
    assert run_of(run.folder / "last") == run_of(tmp_path / "mine") == run.folder
    run.empty()
    assert {path.name for path in run.folder.iterdir() if path.is_symlink()} == {"checkpoints", "data", "translations"}
    assert list((run.folder / "translations").iterdir()) == []
    assert not (run.folder / "last").is_symlink()
