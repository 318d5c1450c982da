"""nmt-train --example: copy a recipe (configs/recipes) out of the installed package into a folder of the user's."""

from __future__ import annotations

import difflib
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from nmt_train.common.errors import UserError


def recipes() -> dict[str, str]:
    """What each recipe is for, by its name: the title of its README."""
    found = {}
    for folder in sorted(_all().iterdir(), key=lambda folder: folder.name):
        title = (folder / "README.md").read_text(encoding="utf-8").partition("\n")[0]
        found[folder.name] = title.removeprefix("# ")
    return found


def listing() -> str:
    """One line per recipe."""
    known = recipes()
    width = max(map(len, known))
    return "".join(f"  {name:{width}}  {title}\n" for name, title in known.items())


def write(name: str, folder: Path) -> None:
    """Copy the files of a recipe. Raises UserError if there is no recipe of this name, or if the folder is not empty."""
    known = recipes()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"--example: there is no recipe {name}; {hint}choose one of these:\n{listing().rstrip()}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--example: {folder} exists and is not an empty folder; name another: --example {name} FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    for file in (_all() / name).iterdir():
        if file.is_file():  # not __pycache__, which installers make
            (folder / file.name).write_bytes(file.read_bytes())


def _all() -> Traversable:
    """The folder of recipes; in a clone a link to configs/recipes, in a wheel a folder with the same files."""
    return files("nmt_train") / "recipes"
