"""A key that does not exist is answered with the one that the user meant, also if another program calls it by that name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nmt_train import config
from nmt_train.common.unknown_key import unknown

# Programs, and names of a level that our keys do not have.
NO_KEYS = {"spm_train", "torchrun", "fairseq-preprocess", "EarlyStoppingCallback", "weight", "r"}
GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
KEYS = config.leaves()


def rows() -> dict[str, list[str]]:
    """Our keys by the options and keys of other programs that the guide's table has beside them."""
    found: dict[str, list[str]] = {}
    table = GUIDE.read_text(encoding="utf-8").partition("| here | Marian |")[2].partition("\n\n")[0]
    for line in table.splitlines():
        ours, *theirs = [re.findall("`([^`]+)`", cell) for cell in line.split("|")[1:-1]]
        keys = [name.split(":")[0] for name in ours if name.split(":")[0] in KEYS]
        names = [name.split(":")[0].split()[0].removeprefix("--") for cell in theirs for name in cell]
        for name in set(names) - NO_KEYS if keys else ():
            found.setdefault(name, []).extend(keys)
    return found


@pytest.mark.parametrize(
    "name", ["learn-rate", "lr-warmup", "disp-freq", "mini-batch", "max-tokens", "warmup_steps", "save-freq"]
)
def test_names_of_other_programs_are_answered_with_our_keys(name: str) -> None:
    assert any(f"did you mean {key}" in unknown(name, KEYS) for key in rows()[name])


def test_no_name_in_the_guide_is_answered_with_a_key_of_another_row() -> None:
    answers = {name: unknown(name, KEYS) for name in rows() if name not in KEYS}
    wrong = {
        name: said for name, said in answers.items() if "did you mean" in said and not any(key in said for key in rows()[name])
    }
    assert wrong == {}
