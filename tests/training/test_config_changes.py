from __future__ import annotations

from conftest import Make

from nmt_train.config import plain
from nmt_train.training.config_changes import differences


def test_differences_name_keys_and_both_values_and_leave_out_the_harmless(make: Make) -> None:
    old = make()
    new = make(
        seed=5, log__every="7u", batch__tokens=99, stop__after="1h", corpus__max_length=50, mode="sparse", model__dropout=0.2,
        recovery__every="7u",
    )  # fmt: skip
    changed = differences(plain(old), new)
    assert changed == [
        "batch.tokens was 1500, now 99", "corpus.max_length was 100, now 50", "model.dropout was 0.1, now 0.2",
        "seed was 1, now 5",
    ]  # fmt: skip


def test_an_optimizer_that_is_named_is_the_one_that_the_mode_has_by_itself(make: Make) -> None:
    assert differences(plain(make(mode="downpour")), make(mode="downpour", optimizer__name="adagrad")) == []
    assert differences(plain(make(mode="downpour")), make(mode="auto")) == []
    changed = differences(plain(make(mode="downpour")), make(mode="sync"))
    assert changed == ["optimizer.name was adagrad, now adam"]


def test_a_key_that_an_earlier_version_did_not_have_counts_as_its_default(make: Make) -> None:
    old = plain(make())
    for name in ("activation", "output_bias", "conventions"):
        del old["model"][name]
    assert differences(old, make()) == []
    assert differences(old, make(model__activation="swish")) == ["model.activation was relu, now swish"]
