"""Checkpoints: one directory each, with safetensors, JSON and checksums; loading runs no code.

A checkpoint is written under a temporary name, then renamed. It holds everything that a run needs to continue, and everything
that translation needs: the parameters by name, the configuration and the vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass as section
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch import Tensor

from nmt_train.common import atomic_file as durable
from nmt_train.common.duration import Duration
from nmt_train.common.errors import UserError, remedy
from nmt_train.common.section import STRICT
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.model.lora import merged
from nmt_train.run.tensor_file import Layout, TensorFile, described

FORMAT = 2
_MANIFEST, _VOCABULARY = "checkpoint.json", "vocabulary.model"


@section(frozen=True, config=STRICT)
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: Duration = Field(
        default=Duration.parse("10m"),
        description="interval between two checkpoints, as 500u, 1e, 300Kt or 10m; a time is lengthened to 20 times what the"
        " last one took; one is always written at the end",
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
            return read_tensors(file)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: damaged ({error}); use another checkpoint of the run") from None

    def has(self, name: str) -> bool:
        return f"{name}.safetensors" in self.facts["files"]

    def best_parameters(self) -> dict[str, Tensor]:
        """The parameters for translation: the smoothed ones if there are any. Low-rank factors are merged into the others."""
        found = self.tensors(self.best_name)
        if not self.has("frozen"):
            return found
        try:
            return merged(found, self.tensors("frozen"))
        except (KeyError, RuntimeError, ZeroDivisionError) as error:
            raise UserError(
                f"{self.path}: its low-rank factors do not fit its other parameters ({error}); use another checkpoint of the"
                " run"
            ) from None

    @property
    def best_name(self) -> str:
        return "smoothed" if self.has("smoothed") else "parameters"

    def expect(self, vocabulary: Vocabulary) -> None:
        """Raise UserError unless the checkpoint's model has this vocabulary, which is its run's."""
        if self.facts["vocabulary"] != vocabulary.digest:
            raise UserError(
                f"{self.path}: was trained with another vocabulary than the run's vocabulary.model; restore the one in the"
                " checkpoint"
            )

    def vocabulary(self) -> Vocabulary:
        """The vocabulary; UserError if it does not belong to the checkpoint's model."""
        vocabulary = Vocabulary.load(self.path / _VOCABULARY)
        if vocabulary.digest != self.facts["vocabulary"]:
            raise UserError(f"{self.path}: its {_VOCABULARY} belongs to another model; use another checkpoint")
        return vocabulary


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU. Raises SafetensorError if it is damaged, and OSError."""
    try:
        str(file).encode()
    except UnicodeEncodeError:  # safetensors opens only paths that are UTF-8
        return load_bytes(file.read_bytes())
    return load_file(file)


class Draft:
    """A checkpoint while it is written, in a folder beside its final place. Any process may add files to this folder."""

    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        self._path, self._vocabulary = path, vocabulary
        self.folder = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        self._files: dict[str, TensorFile] = {}
        self._written: dict[str, dict[str, Any]] = {}

    def create(self, name: str, layout: Layout) -> TensorFile:
        """Add a file (name without suffix) for tensors of these types and shapes."""
        self._files[f"{name}.safetensors"] = file = TensorFile(self.folder / f"{name}.safetensors", layout)
        return file

    def add(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Add a file (name without suffix) with these tensors."""
        file = self.create(name, {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()})
        for key, tensor in tensors.items():
            file.write(key, tensor)

    def added(self, name: str, description: dict[str, Any]) -> None:
        """Record a file (name without suffix) that another process has added. description: see `TensorFile.close`."""
        self._written[f"{name}.safetensors"] = description

    def finish(self, facts: Mapping[str, Any], alive: Callable[[], object] = lambda: None) -> None:
        """Write the manifest, and rename the folder to the checkpoint's path. alive: called after each file."""
        for name, file in self._files.items():
            self._written[name] = file.close()
            alive()
        self._written[_VOCABULARY] = described(self.folder / _VOCABULARY)
        files = dict(sorted(self._written.items()))
        manifest = {"format": FORMAT, "vocabulary": self._vocabulary.digest, "files": files, **facts}
        signed = manifest | {"checksum": _checksum(manifest)}
        (self.folder / _MANIFEST).write_text(json.dumps(signed, indent=1) + "\n", encoding="utf-8")
        for name in (_MANIFEST, _VOCABULARY):
            durable.sync(self.folder / name)
        durable.sync(self.folder)
        replaced = self._path.with_name(f".{self._path.name}.replaced")
        if self._path.exists():  # the same update is saved again, after a validation that a signal postponed
            shutil.rmtree(replaced, ignore_errors=True)
            self._path.rename(replaced)
        self.folder.rename(self._path)
        durable.sync(self._path.parent)
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def draft(path: Path, vocabulary: Vocabulary) -> Iterator[Draft]:
    """Write a checkpoint atomically: `path` appears complete when the draft is finished, even if the process dies or the disk
    is full. Raises UserError if writing fails; no new file remains.
    """
    writing = Draft(path, vocabulary)
    try:
        writing.folder.mkdir(parents=True)
        (writing.folder / _VOCABULARY).write_bytes(vocabulary.model)
        yield writing
    except Exception as error:
        shutil.rmtree(writing.folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        reason = f"{error.strerror}; {remedy(error)}"
        untouched = "; earlier ones are untouched" if any(path.parent.glob("[0-9]*")) else ""
        raise UserError(f"{path}: the checkpoint could not be written: {reason}{untouched}") from None


def save(path: Path, tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any], vocabulary: Vocabulary) -> None:
    """Write a checkpoint as `draft` does. tensors: for each file name (without suffix), the tensors by name."""
    with draft(path, vocabulary) as writing:
        for name, named in tensors.items():
            writing.add(name, named)
        writing.finish(facts)


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
            present = described(file)
        except OSError as error:
            raise UserError(f"{file}: {error.strerror}; use another checkpoint of the run") from None
        if present != {key: expected.get(key) for key in present}:
            size, wanted = present["bytes"], expected.get("bytes")
            what = f"has {size} bytes instead of {wanted}" if size != wanted else "was changed"
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
