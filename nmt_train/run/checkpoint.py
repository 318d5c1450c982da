"""Checkpoints: one directory each, with safetensors, JSON and checksums; loading runs no code.

A checkpoint is written under a temporary name, then renamed. It holds everything that a run needs to continue, and everything
that translation needs: the parameters by name, the configuration and the vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass as section
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nmt_train.common import atomic_file as durable
from nmt_train.common.duration import Duration
from nmt_train.common.errors import UserError
from nmt_train.common.section import STRICT
from nmt_train.corpus.vocabulary import Vocabulary

FORMAT = 1
_MANIFEST, _VOCABULARY = "checkpoint.json", "vocabulary.model"


@section(frozen=True, config=STRICT)
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: Duration = Field(
        default=Duration.parse("1000u"),
        description="interval between two checkpoints, as 500u, 1e, 300Kt or 10m; one is always written at the end",
    )
    keep: int = Field(
        default=3,
        ge=1,
        le=10**9,
        description="number of newest checkpoints to keep, besides the best parameters by each metric",
    )


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint; `facts` is the JSON that `save` was given."""

    path: Path
    facts: dict[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors saved under `name`, on the CPU; UserError if there are none."""
        file = self.path / f"{name}.safetensors"
        if not self.has(name):
            raise UserError(f"{self.path}: holds no {name}; it cannot be used for this")
        try:
            str(file).encode()  # safetensors would call the file damaged
            return load_file(file)
        except UnicodeEncodeError:
            raise UserError(f"{file}: this path is not valid UTF-8; rename the folder") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: damaged ({error}); use another checkpoint of the run") from None

    def has(self, name: str) -> bool:
        return f"{name}.safetensors" in self.facts["files"]

    def best_parameters(self) -> dict[str, Tensor]:
        """The parameters for translation: the smoothed ones if there are any."""
        return self.tensors(self.best_name)

    @property
    def best_name(self) -> str:
        return "smoothed" if self.has("smoothed") else "parameters"

    def vocabulary(self) -> Vocabulary:
        """The vocabulary; UserError if it does not belong to the checkpoint's model."""
        vocabulary = Vocabulary.load(self.path / _VOCABULARY)
        if vocabulary.digest != self.facts["vocabulary"]:
            raise UserError(f"{self.path}: its {_VOCABULARY} belongs to another model; use another checkpoint")
        return vocabulary


def save(path: Path, tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any], vocabulary: Vocabulary) -> None:
    """Write a checkpoint atomically: `path` appears complete or not at all, even if the process dies or the disk is full.

    tensors: for each file name (without suffix), the tensors by name. Raises UserError if writing fails; no new file remains.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        (beside / _VOCABULARY).write_bytes(vocabulary.model)
        mode = (beside / _VOCABULARY).stat().st_mode & 0o777
        for name, named in tensors.items():
            file = beside / f"{name}.safetensors"
            save_file(dict(named), file)
            file.chmod(mode)  # safetensors makes it private, whatever the umask
        files = {file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)} for file in sorted(beside.iterdir())}
        manifest = {"format": FORMAT, "vocabulary": vocabulary.digest, "files": files, **facts}
        signed = manifest | {"checksum": _checksum(manifest)}
        (beside / _MANIFEST).write_text(json.dumps(signed, indent=1) + "\n", encoding="utf-8")
        for file in beside.iterdir():
            durable.sync(file)
        durable.sync(beside)
        replaced = path.with_name(f".{path.name}.replaced")
        if path.exists():  # the same update is saved again, after a validation that a signal postponed
            path.rename(replaced)
        beside.rename(path)
        durable.sync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: the checkpoint could not be written: {reason}; earlier ones are untouched") from None


def load(path: Path) -> Checkpoint:
    """Verify format and checksums of the checkpoint in `path`; UserError says what is wrong with it."""
    try:
        facts = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no checkpoint here (no {_MANIFEST}); give a run folder or one of its checkpoints") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path / _MANIFEST}: cannot be read ({error}); use another checkpoint of the run") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT or not isinstance(facts.get("files"), dict):
        raise UserError(f"{path / _MANIFEST}: not a checkpoint of format {FORMAT}; use the version that wrote it")
    if facts.pop("checksum", None) != _checksum(facts):
        raise UserError(f"{path / _MANIFEST}: was changed since it was saved; use another checkpoint of the run")
    for name, expected in facts["files"].items():
        file = path / Path(name).name
        if not isinstance(expected, dict):
            raise UserError(f"{path / _MANIFEST}: says nothing about {file.name}; use another checkpoint of the run")
        try:
            size, digest = file.stat().st_size, _digest(file)
        except OSError as error:
            raise UserError(f"{file}: {error.strerror}; use another checkpoint of the run") from None
        if (size, digest) != (expected.get("bytes"), expected.get("sha256")):
            what = f"has {size} bytes instead of {expected.get('bytes')}" if size != expected.get("bytes") else "was changed"
            raise UserError(f"{file}: {what} since it was saved; use another checkpoint of the run")
    return Checkpoint(path, facts)


def remove(path: Path) -> None:
    """Delete a checkpoint. If this is interrupted, what remains is not mistaken for a checkpoint."""
    doomed = path.with_name(f".{path.name}.{os.getpid()}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clean(folder: Path) -> None:
    """Undo or finish interrupted saves and removals in a folder of checkpoints; no other process may use the folder."""
    for replaced in folder.glob(".*.replaced"):
        original = folder / replaced.name.split(".")[1]
        if original.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(original)
    for left in [*folder.glob(".*.tmp"), *folder.glob(".*.old")]:
        shutil.rmtree(left, ignore_errors=True)


def _checksum(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _digest(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
