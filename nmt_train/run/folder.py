"""The run folder: its lock, its layout, and its links to checkpoints."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from nmt_train.common import atomic_file as durable
from nmt_train.common.errors import TRY_AGAIN, UserError, remedy
from nmt_train.common.streams import tell
from nmt_train.common.yaml_file import read
from nmt_train.run import checkpoint
from nmt_train.run.link import followed, is_link, point
from nmt_train.run.trackers import IDENTITIES

_CHECKPOINTS = ("checkpoints", "best")
_FOLDERS = ("trace", "translations", "tensorboard", "wandb")
_LOCK = ".lock"
_LINKS = 40  # as many as Linux follows
_CONFIG, _SIMULATED, _VOCABULARY = "config.yml", "simulated.yml", "vocabulary.model"
_SECTIONS = {"run", "corpus", "model", "optimizer"}  # some keys of a configuration; other programs do not have all of them
METRICS = "metrics.jsonl"  # every event of a run
TIMING = "timing.json"  # of a simulation of the timing alone
MACHINES = "machines.yml"  # a cluster file: the machines as `mode: auto` has measured them
_WRITTEN = frozenset({
    METRICS, "train.log", _VOCABULARY, _CONFIG, _SIMULATED, MACHINES, TIMING, IDENTITIES, "compare.json", "compare.png",
})  # fmt: skip
# Seconds. A network file system releases the lock of a lost machine when the lease of that machine expires: after 90 s on most
# NFS servers, after some minutes on others.
_PATIENCE, _LOOK = 300.0, 2.0


class InUse(UserError):
    """Another process has held the run folder for longer than a lost machine could hold it."""

    status = TRY_AGAIN


class Elsewhere(UserError):
    """A restarted job does not find its run, which is on a disk of another machine."""

    status = TRY_AGAIN


@dataclass
class Run:
    """`checkpoints/<update>/` are complete checkpoints; the link `last` points to the newest. `best/<update>/` hold only
    parameters; the links `best-<metric>` point to them.
    """

    folder: Path
    _lock: TextIO | None = None
    _warned: bool = False  # that there are no symbolic links

    @classmethod
    def open(cls, folder: Path, patient: bool = False) -> Run:
        """Create the folder if necessary and lock it. Raises UserError if another process has locked it or it is not writable.

        patient: a lost machine may hold the lock, so wait for it for up to five minutes before raising InUse.
        """
        try:
            for name in _CHECKPOINTS:
                (folder / name).mkdir(parents=True, exist_ok=True)
            lock = open(folder / _LOCK, "a+", encoding="utf-8")
        except OSError as error:
            raise UserError(f"run: {folder}: {error.strerror}; {remedy(error)}, or choose another folder") from None
        try:
            _lock(lock, folder, patient)
        except BaseException:
            lock.close()
            raise
        for path in cls(folder)._links():
            if path.is_dir() and not path.is_symlink():
                lock.close()
                raise UserError(
                    f"run: {path} is a folder instead of a link, perhaps because the run was copied without its links; remove"
                    f" it: the checkpoints are in {folder / 'checkpoints'}"
                )
        try:
            lock.truncate(0)
            print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
        except OSError as error:
            with suppress(OSError):
                lock.close()
            raise UserError(f"run: {folder}: {error.strerror}; {remedy(error)}, or choose another folder") from None
        for name in _CHECKPOINTS:
            checkpoint.clean(folder / name)
        return cls(folder, lock)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def checkpoint(self, update: int) -> Path:
        return self.folder / "checkpoints" / str(update)

    def best(self, update: int) -> Path:
        return self.folder / "best" / str(update)

    def checkpoints(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        return _numbered(self.folder / "checkpoints")

    def last(self) -> Path | None:
        """The newest checkpoint, or None. The link `last` may be older, if the process was killed before it set the link."""
        checkpoints = self.checkpoints()
        return checkpoints[-1] if checkpoints else None

    def link(self, name: str, target: Path) -> None:
        """Point the link `name` to a folder of the run, atomically."""
        if not point(self.folder / name, target) and not self._warned:
            self._warned = True
            tell(
                f"nmt-train: warning: run: {self.folder}: its file system has no symbolic links: last and best-* are files with"
                " the path of a checkpoint, which the commands of nmt_train follow"
            )

    def keep_best(self, update: int, metrics: Sequence[str]) -> None:
        """Link the parameters of this update as the best by these metrics; delete parameters that are not the best by any."""
        for metric in metrics:
            self.link(f"best-{metric}", self.best(update))
        self._remove_unlinked(_numbered(self.folder / "best"))

    def refuse_other_kind(self, simulated: bool) -> None:
        """Raise UserError if a simulation would continue a real run, or the reverse: simulated seconds are not real seconds."""
        is_simulated = (self.folder / _SIMULATED).exists()
        if simulated and not is_simulated and (self.checkpoints() or (self.folder / METRICS).exists()):
            raise UserError(
                f"run: {self.folder} holds a real run, which a simulation would continue in virtual time; choose another folder"
                " with --run, or discard the real run with --overwrite"
            )
        if is_simulated and not simulated:
            raise UserError(
                f"run: {self.folder} holds a simulated run ({_SIMULATED}), whose times are virtual; choose another folder, or"
                " discard the simulated run with --overwrite"
            )

    def refuse_foreign(self) -> None:
        """Raise UserError if a run that begins here would change or append to a file of another program."""
        if any((path / "checkpoint.json").exists() for path in self.checkpoints()) or self._begun():
            return
        lock = self.folder / _LOCK
        files = [self.folder / name for name in (_CONFIG, "train.log", METRICS, MACHINES, _SIMULATED)]
        files += [lock] * (lock.is_file() and not lock.read_bytes().startswith(b"process "))
        files += [*self.folder.glob("translations/[0-9]*.txt"), *self.folder.glob("trace/rank*.jsonl")]
        files += [path for name in _CHECKPOINTS for path in _numbered(self.folder / name)]
        files += [path for path in self._links() if path.is_file() and not is_link(path)]
        for path in files:
            if path.is_dir() or (path.is_file() and path.stat().st_size):
                raise UserError(
                    f"run: {path} belongs to no run of nmt_train, and training would change it; move it, or choose another run"
                    " folder"
                )

    def _begun(self) -> bool:
        """Whether a run has begun here."""
        try:
            return (self.folder / _VOCABULARY).exists() and read(self.folder / _CONFIG, {}, "").keys() >= _SECTIONS
        except UserError:
            return False

    def _links(self) -> list[Path]:
        return [self.folder / "last", *self.folder.glob("best-*")]

    def refuse_elsewhere(self) -> None:
        """Raise Elsewhere unless a run has begun in this folder."""
        if not (self.folder / _CONFIG).exists():
            raise Elsewhere(
                f"run: {self.folder} on {socket.gethostname()} is empty, although the run had begun: start the machine that has"
                " it; with --restarts, use a folder that all machines share"
            )

    def begin(self, configuration: str, vocabulary: bytes, simulated: str = "") -> None:
        """Write the resolved configuration (YAML) and the SentencePiece model of the run; simulated: the cluster (YAML)."""
        files = {_VOCABULARY: vocabulary, _CONFIG: configuration.encode()}  # the second shows that a run has begun
        if simulated:
            files[_SIMULATED] = simulated.encode()
        for name, data in files.items():
            durable.write(self.folder / name, data)

    def keep_translations(self, name: str, lines: list[str]) -> None:
        """Write the translations of a validation to `translations/<name>.txt`."""
        folder = self.folder / "translations"
        folder.mkdir(exist_ok=True)
        durable.write(folder / f"{name}.txt", "".join(line + "\n" for line in lines).encode())

    def prune(self, keep: int) -> None:
        """Delete all checkpoints except the newest `keep` and those that a link points to."""
        self._remove_unlinked(self.checkpoints()[:-keep])

    def _remove_unlinked(self, paths: Sequence[Path]) -> None:
        # Names with a dot are links in the making; the other thread (validation or checkpoint) may rename them just now.
        links = [path for path in self.folder.iterdir() if not path.name.startswith(".") and is_link(path)]
        linked = {followed(path).resolve() for path in links}
        for path in paths:
            if path.resolve() not in linked:
                checkpoint.remove(path)

    def empty(self) -> None:
        """Delete everything that training wrote in this folder."""
        for name in (*_CHECKPOINTS, *_FOLDERS):
            place = self.folder / name
            for path in [*place.iterdir()] if place.is_symlink() else [place]:  # a link to another disk stays
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.name in _WRITTEN or (is_link(path) and (path.name == "last" or path.name.startswith("best-"))):
                path.unlink()
        for name in _CHECKPOINTS:
            (self.folder / name).mkdir(exist_ok=True)


def is_simulation(folder: Path) -> bool:
    """Whether a run folder's times are virtual."""
    return (folder / _SIMULATED).exists() or ((folder / TIMING).exists() and not (folder / "metrics.jsonl").exists())


def mode_of(folder: Path) -> str:
    """The mode of a run, from its configuration; empty if the folder has none that can be read."""
    try:
        mode = read(folder / _CONFIG, {}, "").get("mode")
    except UserError:
        return ""
    return mode if isinstance(mode, str) else ""


def refuse_existing(out: Path) -> None:
    """Raise UserError if the new folder `out` already exists."""
    if out.exists() or out.is_symlink():
        raise UserError(f"{out}: already exists; name a new folder, or remove it")


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint is in, or None if it is elsewhere, e.g. a copy."""
    checkpoint = followed(checkpoint)
    for _ in range(_LINKS):  # follow links only as far as the run: the folder of all its checkpoints may be a link, too
        parent = checkpoint.absolute().parent
        if parent.name in _CHECKPOINTS:
            return parent.parent
        if not checkpoint.is_symlink():
            return None
        checkpoint = checkpoint.parent / checkpoint.readlink()
    return None


def _numbered(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted((path for path in folder.glob("*") if path.name.isdigit()), key=lambda path: int(path.name))


def _lock(lock: TextIO, folder: Path, patient: bool) -> None:
    waited = 0.0
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            used = f"run: {folder} is in use by {lock.read().strip() or 'another process'}"
        except OSError as error:
            what = f"run: {folder} cannot be locked ({error.strerror}): do not use it for two runs at the same time"
            tell(f"nmt-train: warning: {what}")
            return None
        if not patient:
            raise UserError(f"{used}; wait for it, or choose another folder")
        if waited >= _PATIENCE:
            raise InUse(f"{used}, still after {waited:.0f} s; check whether it is alive, then start the same command again")
        if not waited:
            tell(f"nmt-train: {used}: waiting for it for up to {_PATIENCE:.0f} s")
        time.sleep(_LOOK)
        waited += _LOOK


def newest(path: Path, count: int) -> list[Path]:
    """The newest `count` checkpoints at `path` (see `find_checkpoints`); UserError if there are fewer."""
    found = find_checkpoints(path)
    if len(found) < count:
        raise UserError(f"{path}: has {len(found)} checkpoint{'s'[: len(found) != 1]}, not the {count} that --average asks for")
    return found[-count:]


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoints at `path`, oldest first; `path` is one checkpoint (or a link to one) or a run folder."""
    path = followed(path)
    if (path / "checkpoint.json").exists():
        return [path]
    found = Run(path).checkpoints()
    if not found:
        what = "holds no checkpoint" if path.exists() else "does not exist, or is a broken link"
        text = "; nmt-translate reads text from standard input" if path.is_file() else ""
        raise UserError(f"{path}: {what}; give a run folder or one of its checkpoints{text}")
    return found
