"""What many specifications need: a small corpus of real sentences, and the configuration of a run that takes seconds."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from nmt_train import config as configuration
from nmt_train.config import Config
from nmt_train.corpus.train_vocabulary import train
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.training.start import start

ROOT = Path(__file__).parent.parent
Make = Callable[..., Config]
Once = Callable[[str, Callable[[Path], object]], Path]

torch.set_num_threads(1)  # small matrices: a second thread only adds noise beside other processes

settings.register_profile("untimed", deadline=None)  # the first call of a function may compile it
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # slow ones first: then all processes end together
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="this machine offers no GPU to torch"))


@pytest.fixture(scope="session")
def common_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary folder that all processes of pytest-xdist have in common."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def once(common_folder: Path) -> Once:
    """once(name, fill) is a folder that `fill(folder)` has filled. The first process that asks for a name fills its folder, and
    the others wait for it. Tests only read what is in it.
    """

    def make_once(name: str, fill: Callable[[Path], object]) -> Path:
        folder, filled = common_folder / name, common_folder / f"{name}.filled"
        with open(common_folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not filled.exists():
                shutil.rmtree(folder, ignore_errors=True)  # another process has failed to fill it
                folder.mkdir()
                fill(folder)
                filled.touch()
        return folder

    return make_once


@pytest.fixture(scope="session", autouse=True)
def cache(common_folder: Path, pytestconfig: pytest.Config) -> Iterator[None]:
    """Tokenized corpora of the tests do not go to the user's cache. Machine code stays in .pytest_cache for the next time."""
    ours = common_folder / "cache" / "nmt_train"
    ours.mkdir(parents=True, exist_ok=True)
    if kept := getattr(pytestconfig, "cache", None):  # pytest may run with -p no:cacheprovider
        with suppress(FileExistsError):
            (ours / "compiled").symlink_to(kept.mkdir("compiled"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(ours.parent))
        yield


@pytest.fixture
def without_nohup() -> Iterator[None]:
    """Processes that this test starts do not ignore SIGHUP, even if the tests were started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def demo(once: Once) -> Path:
    """A folder with train, valid and test .en and .de of the demo grammar."""

    def write(folder: Path) -> None:
        subprocess.run([sys.executable, ROOT / "scripts" / "make_demo_corpus", folder, "--pairs", "600"], check=True)
        for part in ("valid", "test"):
            for language in ("en", "de"):
                path = folder / f"{part}.{language}"
                path.write_text("".join(path.read_text(encoding="utf-8").splitlines(True)[:20]), encoding="utf-8")

    return once("demo", write)


def small(demo: Path, run: Path) -> dict[str, Any]:
    """Values of a run on the demo corpus with a model of a few thousand parameters; three batches to an epoch or so."""
    return {
        "run": str(run),
        "threads": 1,
        "devices": "cpu",
        "precision": "fp32",
        "corpus": {
            "train": [f"{demo}/train.en", f"{demo}/train.de"],
            "valid": [f"{demo}/valid.en", f"{demo}/valid.de"],
            "vocabulary": {"size": 120},
        },
        "batch": {"tokens": 1500},
        "model": {"encoder_layers": 1, "decoder_layers": 1, "dim": 16, "ffn_dim": 32, "heads": 2, "dropout": 0.1},
        "optimizer": {"learning_rate": 0.01, "warmup": 5},
        "validation": {"every": None, "metrics": ["cross-entropy"]},
        "stop": {"after": "6u"},
    }


@pytest.fixture(scope="session")
def trained(demo: Path, once: Once) -> Path:
    """A run with two checkpoints, of which the second translates better, and whose translations end by themselves."""

    def train_it(folder: Path) -> None:
        values = small(demo, folder / "run")
        values |= {"stop": {"after": "600u"}, "checkpoint": {"every": "300u"}}
        values["validation"] = {"every": "300u", "metrics": ["cross-entropy", "bleu"]}
        values["model"] |= {"dim": 64, "ffn_dim": 128}
        values["optimizer"] = {"learning_rate": 0.005, "warmup": 50}
        assert start(configuration.validate(values, {}), False, False) == 0

    return once("trained", train_it) / "run"


@pytest.fixture
def make(demo: Path, tmp_path: Path) -> Make:
    """make(**changes) is a small configuration; changes are dotted keys with `__` for the dot."""

    def make_config(**changes: Any) -> Config:
        values = small(demo, tmp_path / "run")
        for name, value in changes.items():
            *parents, last = name.split("__")
            section = values
            for parent in parents:
                section = section.setdefault(parent, {})
            section[last] = value
        return configuration.validate(values, {})

    return make_config


@pytest.fixture(scope="session")
def vocabulary(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return train(configuration.validate(small(demo, tmp_path_factory.mktemp("run")), {}).corpus)
