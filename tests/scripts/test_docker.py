"""The steps of configs/docker/Dockerfile, run without Docker.

A folder takes the place of the image, and new environments borrow the packages of the environment of the tests.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from installed import OFFLINE

EXTRAS = "nmt_train[export,tensorboard,zstd]"


class Image:
    """What the steps of a Dockerfile make, in a folder: an absolute path such as /opt means the folder's own opt."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment, self.stages = folder, environment, 0
        self._work = folder

    def inside(self, text: str) -> str:
        """The text with the folder before each absolute path."""
        return re.sub(r"(?<![^\s:=])/(?=\w)", f"{self.folder}/", text)

    def begin(self) -> None:
        """Begin a stage: the files of the one before it are kept aside for COPY --from."""
        if self.stages:
            self.folder.rename(self.before)
        self.stages += 1
        for name in ("opt", "home"):
            (self.folder / name).mkdir(parents=True)
        self._work = self.folder

    @property
    def before(self) -> Path:
        return self.folder.with_name("before")

    def step(self, name: str, text: str) -> None:
        match name:
            case "FROM":
                assert text.split()[0] == "${BASE}"
                self.begin()
            case "ARG" | "USER":
                pass
            case "WORKDIR":
                self._work = Path(self.inside(text))
                self._work.mkdir(parents=True, exist_ok=True)
            case "ENV":
                for word in shlex.split(text):
                    key, _, value = word.partition("=")
                    self.environment[key] = self.inside(value).replace(f"${key}", self.environment.get(key, ""))
            case "COPY":
                *sources, target = text.split()
                self._copy(sources, target)
            case "RUN":
                self.run(text)
            case _:
                raise AssertionError(f"{name}: a step that this test does not know")

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", self.inside(command)], cwd=self._work, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _copy(self, sources: list[str], target: str) -> None:
        if sources[0].startswith("--from="):
            (path,) = sources[1:]
            assert path == target, "an environment works only in the folder where it was made"
            (self.before / path.lstrip("/")).rename(self.inside(target))
            return
        for source in sources:
            own = ROOT / source
            if own.is_dir():
                shutil.copytree(own, self._work / target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                assert target.endswith("/")
                (self._work / target).mkdir(exist_ok=True)
                shutil.copy(own, self._work / target)


def steps(dockerfile: str) -> list[tuple[str, str]]:
    """Instruction and text of each step; continued lines are joined."""
    text = re.sub(r"(?m)^#.*\n", "", dockerfile).replace("\\\n", " ")
    found = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(name, rest) for name, rest in found]


@pytest.mark.slow
@pytest.mark.skipif(
    Path(sys.prefix).name.startswith(".venv-lowest"), reason="the image has the locked versions of the dependencies"
)
def test_the_steps_of_the_dockerfile_make_an_image_whose_commands_work(tmp_path: Path) -> None:
    python = tmp_path / "python3"  # as the base image's, except that new environments get links instead of downloads
    python.write_text(
        "#!/usr/bin/env bash\nset -e\n"
        f'{sys.executable} "$@"\n'
        '[ "$1 $2" = "-m venv" ] || exit 0\n'
        '"$3/bin/python" -m pip uninstall --quiet --yes setuptools\n'
        f'{sys.executable} {ROOT}/tests/helpers/installed.py "$3" setuptools {shlex.quote(EXTRAS)}\n',
        encoding="utf-8",
    )
    python.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_", "VIRTUAL_ENV"))}
    image = Image(tmp_path / "image", kept | OFFLINE | {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    for name, text in steps((ROOT / "configs" / "docker" / "Dockerfile").read_text(encoding="utf-8"))[1:]:
        image.step(name, text)
    assert image.stages == 2
    shutil.rmtree(image.before)  # the image does not contain the first stage
    where = image.run("python -c 'import nmt_train; print(nmt_train.__file__)'")
    assert where.startswith(str(image.folder / "opt"))
    assert not (image.folder / "opt/nmt_train/bin/pytest").exists()
    assert "No broken requirements" in image.run("python -m pip check")
    assert "usage: nmt-export" in image.run("nmt-export --help")
    assert "one-device" in image.run("nmt-train --example")
    assert image.run("echo $HOME").strip() == str(image.folder / "home/nmt")
    assert (image.folder / "home/nmt").stat().st_mode & 0o777 == 0o777
    assert "mode: sync" in image.run(
        "nmt-train --corpus.train a b --corpus.valid a b --stop.after 1e --mode sync --print-config"
    )
