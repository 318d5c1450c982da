"""Prerequisites of benchmarks and experiments: the project's .venv, the corpus, a vocabulary."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The environment of the project that runs this script (see scripts/environment), or the one in which it is to run.
INSIDE = next((each for each in ROOT.glob(".venv*") if each.resolve() == Path(sys.prefix).resolve()), None)
BIN = (INSIDE or ROOT / ".venv") / "bin"


def go_inside() -> None:
    """Restart this script inside .venv, which is created if necessary, unless it runs in an environment of the project.

    Call this before importing from the project.
    """
    if INSIDE is None:
        subprocess.run([ROOT / "scripts" / "environment"], check=True)
        os.execv(BIN / "python", [str(BIN / "python"), *sys.argv])


def prepare(config: str, vocabulary: Path) -> Path:
    """Download Multi30k, if the config file uses it, and train its vocabulary into `vocabulary`, unless they exist."""
    uses = "data/multi30k/" in (ROOT / config).read_text(encoding="utf-8")
    if uses and not (ROOT / "data" / "multi30k" / "train.en.gz").exists():
        subprocess.run([ROOT / "scripts" / "get_data", "multi30k"], check=True)
    if not vocabulary.exists():
        from nmt_train import config as configuration
        from nmt_train.corpus.train_vocabulary import train

        vocabulary.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.chdir(ROOT):  # the paths in the config file are relative
            model = train(configuration.load([str(ROOT / config)], {}).corpus).model
        vocabulary.write_bytes(model)
    return vocabulary
