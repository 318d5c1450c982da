"""Configurations as files, and the checkpoints of the runs that they describe."""

from __future__ import annotations

from pathlib import Path

from nmt_train.config import Config
from nmt_train.config_text import to_yaml
from nmt_train.run import checkpoint
from nmt_train.run.folder import Run


def written(config: Config, name: str = "config.yml") -> str:
    path = Path(config.run).parent / name
    path.write_text(to_yaml(config), encoding="utf-8")
    return str(path)


def last(config: Config) -> checkpoint.Checkpoint:
    path = Run(Path(config.run)).last()
    assert path is not None
    return checkpoint.load(path)
