"""Checks that the manifest of a checkpoint holds everything that a run needs to continue from it."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from nmt_train.common.errors import UserError
from nmt_train.common.section import problem
from nmt_train.run import checkpoint
from nmt_train.run.checkpoint import Checkpoint
from nmt_train.run.progress import Progress

_Count = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
_Number = Annotated[float, Field(strict=True)]


@dataclass
class _Optimizer:
    updates: _Count
    torch: dict[str, _Number]


@dataclass
class _Corpus:
    pairs: _Count
    checksum: str


_Stage = Annotated[list[tuple[_Count, _Count]], Field(min_length=1)]  # epochs and batches of each worker


@dataclass
class _Facts:
    vocabulary: str
    config: dict[str, Any]
    progress: dict[str, _Amount]
    patience: dict[str, tuple[_Number, _Count, _Count, str]]
    validation_pending: bool
    optimizer: _Optimizer
    history: list[dict[str, Any]]
    corpora: list[_Corpus] = field(default_factory=list)  # empty: the model was imported
    stages: Annotated[list[_Stage], Field(min_length=1)] | None = None  # None: a checkpoint of only the best parameters


_FACTS = TypeAdapter(_Facts)


def load_verified(path: Path) -> Checkpoint:
    """Verify the files and the manifest of the checkpoint in `path` and return it; UserError says what is wrong with it."""
    saved = checkpoint.load(path)
    try:
        _FACTS.validate_python(saved.facts)
        Progress(**saved.facts["progress"])
    except (ValidationError, TypeError) as error:
        what = f"progress: {error}"
        if isinstance(error, ValidationError):
            wrong = problem(error)
            what = f"{'.'.join(wrong.path)}: {wrong.text}"
        raise UserError(
            f"{path}: its manifest is not as it should be: {what}; use another checkpoint, or the version that wrote it"
        ) from None
    return saved
