"""File systems without symbolic links, syncs, locks or permissions, as exFAT, CIFS and FUSE may be: a run trains there."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Make
from test_checkpoint import save
from written import written

from nmt_train import cli
from nmt_train.cli import train, translate, validate
from nmt_train.common import atomic_file as durable
from nmt_train.common.errors import UserError
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.run.folder import Run, newest, run_of
from nmt_train.run.link import followed, is_link

MISSING = [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL]


def refuse(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.fixture(params=MISSING, ids=errno.errorcode.get)
def no_links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def symlink(*arguments: object, **options: object) -> None:
        raise refuse(request.param)

    with monkeypatch.context() as patch:
        patch.setattr(os, "symlink", symlink)
        yield


def test_without_symbolic_links_files_name_the_checkpoints(
    no_links: None, tmp_path: Path, vocabulary: Vocabulary, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.open(tmp_path / "run")
    for update in (1, 2, 3, 4):
        save(run.checkpoint(update), vocabulary, update)
        run.link("last", run.checkpoint(update))
    run.link("best-bleu", run.checkpoint(1))
    run.prune(keep=2)
    assert [path.name for path in run.checkpoints()] == ["1", "3", "4"]
    assert (run.folder / "best-bleu").read_text() == "checkpoints/1\n"
    assert newest(run.folder / "best-bleu", 1) == [run.checkpoint(1)]
    assert newest(run.folder / "last", 1) == [run.checkpoint(4)]
    assert run_of(run.folder / "last") == run.folder
    assert capsys.readouterr().err.count("has no symbolic links: last and best-* are files") == 1
    run.empty()
    assert not (run.folder / "last").exists()
    assert not (run.folder / "best-bleu").exists()


def test_a_run_may_move_between_file_systems_with_and_without_links(tmp_path: Path, vocabulary: Vocabulary) -> None:
    run = Run.open(tmp_path / "run")
    save(run.checkpoint(1), vocabulary, 1)
    save(run.checkpoint(2), vocabulary, 2)
    (run.folder / "last").write_bytes(b"checkpoints/1\r\n")
    (tmp_path / "mine").symlink_to(run.folder / "last")
    assert newest(tmp_path / "mine", 1) == [run.checkpoint(1)]
    assert run_of(tmp_path / "mine") == run.folder
    run.link("last", run.checkpoint(2))
    assert (run.folder / "last").is_symlink()
    run.close()
    Run.open(run.folder).close()


@pytest.mark.parametrize("text", ["../secret", "checkpoints/../../1", "/etc", "checkpoints/1 2", "", "checkpoints", "é" * 10])
def test_a_file_that_names_no_checkpoint_is_no_link(text: str, tmp_path: Path) -> None:
    (tmp_path / "last").write_text(text, encoding="utf-8")
    assert not is_link(tmp_path / "last")
    assert followed(tmp_path / "last") == tmp_path / "last"
    with pytest.raises(UserError, match="last: holds no checkpoint"):
        newest(tmp_path / "last", 1)


@pytest.mark.slow
def test_a_run_trains_resumes_is_validated_translates_and_is_fine_tuned_without_links(
    no_links: None, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    for stop in ("3u", "6u"):
        config = make(stop__after=stop, validation__every="3u", checkpoint__every="3u")
        assert cli.run(train.command, ["--config", written(config), "--force"]) == 0
    said = capsys.readouterr()
    assert said.err.count("has no symbolic links") == 2  # once per start
    assert cli.run(validate.command, [str(run / "last"), str(run / "best-cross-entropy"), "--metrics", "cross-entropy"]) == 0
    assert f"{run}/checkpoints/6 " in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n")))
    assert cli.run(translate.command, ["--model", str(run / "last"), "--devices", "cpu"]) == 0
    fine = make(run=str(tmp_path / "fine"), init=str(run / "best-cross-entropy"))
    assert cli.run(train.command, ["--config", written(fine)]) == 0
    assert f"parameters and vocabulary of {run}/best/" in capsys.readouterr().err


@pytest.mark.parametrize("number", MISSING, ids=errno.errorcode.get)
def test_without_syncs_of_folders_files_are_written_with_one_warning(
    number: int, tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fsync = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise refuse(number)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    durable.unable.cache_clear()
    for update in (1, 2):
        save(tmp_path / str(update), vocabulary, update)
        durable.write(tmp_path / "config.yml", b"text")
    assert capsys.readouterr().err.count("warning: this file system cannot sync files or folders") == 1


def test_without_permissions_checkpoints_are_written(
    tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chmod(*arguments: object, **options: object) -> None:
        raise refuse(errno.EPERM)

    monkeypatch.setattr(os, "chmod", chmod)
    save(tmp_path / "1", vocabulary)


FOREIGN = {
    "config.yml": "workspace: 9000\n",
    "train.log": "another program\n",
    "machines.yml": "a: 1\n",
    "translations/3.txt": "a line\n",
    "trace/rank0.jsonl": "{}\n",
    "checkpoints/7/weights.bin": "x",
    ".lock": "1234\n",
    "last": "see checkpoint 5\n",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_another_program_is_not_changed(
    name: str, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text(FOREIGN[name], encoding="utf-8")
    assert cli.run(train.command, ["--config", written(make(), "mine.yml")]) == 2
    error = capsys.readouterr().err
    assert "belongs to no run of nmt_train, and training would change it; move it" in error
    assert name.startswith(str(Path(error.removeprefix("error: run: ").split(" ")[0]).relative_to(tmp_path / "run")))
    assert {path for path in (tmp_path / "run").rglob("*") if path.is_file()} == {file}
    assert file.read_text(encoding="utf-8") == FOREIGN[name]


@pytest.mark.slow
def test_an_empty_log_of_the_shell_and_a_run_that_has_made_no_checkpoint_are_no_foreign_files(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.log").touch()
    arguments = ["--config", written(make(stop__after="2u"), "mine.yml"), "--force"]
    assert cli.run(train.command, arguments) == 0
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.rename(tmp_path / "gone")
    assert cli.run(train.command, arguments) == 0
