"""Values that a configuration leaves open are decided by the device and the corpus, once for a run, and alike on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Make, small
from virtual import cluster, engine, together
from written import last

from nmt_train import config as configuration
from nmt_train.common.errors import UserError
from nmt_train.config import Config, plain
from nmt_train.config_text import to_yaml
from nmt_train.corpus.store import open_stores
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.model import PRESETS
from nmt_train.open_keys import OPEN
from nmt_train.run.checkpoint import Checkpoint
from nmt_train.simulation.simulate import simulate
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.training import defaults
from nmt_train.training.config_changes import differences
from nmt_train.training.defaults import RECIPES, follow, follow_mode, lead, lead_mode, with_device, with_mode, without_device
from nmt_train.training.device_trials import Tried, fit
from nmt_train.training.start import start

CPU = torch.device("cpu")
OF_PRESET = {f"model.{key}" for key in PRESETS["small"]}


def bare(demo: Path, **more: Any) -> Config:
    """A run that gives nothing of what can be decided."""
    values = small(demo, demo / "run")
    given = {key: values[key] for key in ("run", "corpus", "stop", "validation")}
    return configuration.validate({**given, **more}, {})


def pairs(number: int) -> Any:
    """A corpus of this many pairs, whose targets have 9 pieces each."""
    return SimpleNamespace(identity=[{"pairs": number}], lengths=lambda: [(np.full(4, 9), np.full(4, 9))])


def test_without_a_value_or_with_auto_all_keys_are_open(demo: Path) -> None:
    assert set(bare(demo).undecided) == {*OPEN, *OF_PRESET}
    auto = {"precision": "auto", "batch": {"tokens": "auto"}, "model": {"preset": "auto"}}
    config = bare(demo, **auto, optimizer={"learning_rate": "auto", "warmup": "auto"})
    assert config == bare(demo)
    assert configuration.validate(plain(config), {}) == config
    assert "preset: auto" in to_yaml(config)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"precision": "fp32"}, "precision"), ({"batch": {"sentences": 64}}, "batch.tokens"),
        ({"model": {"dim": 64}}, "model.preset"), ({"model": {"dropout": 0.3}}, "model.dropout"),
        ({"batch": {"sentences": 64, "tokens": "auto"}}, "batch.tokens"),
        ({"model": {"preset": "small"}}, "model.preset"), ({"optimizer": {"warmup": 0}}, "optimizer.warmup"),
    ],
)  # fmt: skip
def test_what_is_given_is_not_open(demo: Path, given: dict[str, Any], name: str) -> None:
    assert set(bare(demo, **given).undecided) - OF_PRESET == set(OPEN) - {name}
    assert name not in bare(demo, **given).undecided


def test_dropout_is_that_of_the_preset_unless_it_is_given(demo: Path) -> None:
    for given, dropout in (({}, PRESETS["tiny"]["dropout"]), ({"dropout": 0.7}, 0.7)):
        config, _ = without_device(bare(demo, model=given), pairs(100), (0,))
        assert (config.model.dim, config.model.dropout) == (PRESETS["tiny"]["dim"], dropout)


def test_a_rate_that_is_not_decided_is_compared_with_nothing(demo: Path) -> None:
    config = bare(demo, optimizer={"schedule": "cosine", "minimum": 0.0005})
    assert without_device(config, pairs(100), (0,))[0].optimizer.learning_rate == pytest.approx(0.006)


@pytest.mark.parametrize(
    ("given", "nodes", "gpus", "algorithm"),
    [
        ({}, (0, 0), True, "torch"), ({"replicas": {"codec": "bf16"}}, (0, 0), True, "torch"),
        ({}, (0, 0), False, "ring"), ({}, (0, 1), True, "ring"), ({}, (0,), True, "ring"),
        ({"replicas": {"codec": "half"}}, (0, 0), True, "ring"), ({"mode": "low-bit"}, (0, 0), True, "ring"),
        ({"mode": "vanilla"}, (0, 0), True, "ring"), ({"replicas": {"algorithm": "butterfly"}}, (0, 0), True, "butterfly"),
    ],
)  # fmt: skip
def test_gpus_of_one_machine_add_up_by_nccl(
    demo: Path, given: dict[str, Any], nodes: tuple[int, ...], gpus: bool, algorithm: str
) -> None:
    config, said = defaults.with_mode(bare(demo, **{"mode": "sync", **given}), pairs(100), nodes, gpus)
    assert config.replicas.algorithm == algorithm
    assert ("NCCL" in "".join(said)) == (algorithm == "torch")


def test_a_size_beside_preset_auto_is_refused(demo: Path) -> None:
    with pytest.raises(UserError, match="model.preset auto would replace model.dim; remove one of the two"):
        bare(demo, model={"preset": "auto", "dim": 64})


@pytest.mark.parametrize(
    ("number", "device", "preset"),
    [(29_000, "cpu", "tiny"), (200_000, "cpu", "small"), (5_000_000, "cpu", "small"), (5_000_000, "cuda", "base")],
)
def test_the_preset_is_decided_by_the_size_of_the_corpus(demo: Path, number: int, device: str, preset: str) -> None:
    config, said = defaults._of_model(bare(demo), pairs(number), None, None, small=device == "cpu")
    assert {key: plain(config)["model"][key] for key in PRESETS[preset]} == PRESETS[preset]
    assert f"model.preset {preset}, for {number:,} pairs" in said[0]


@pytest.mark.parametrize(
    ("faster", "precision", "tokens"),
    [
        ((2.0, 1.5), "bf16", 3999), ((2.0, 1.0), "fp32", 999), ((0.0,), "fp32", 1000), ((0.9, 1.0), "fp32", 999),
        ((math.inf, math.inf), "bf16", 3999),
    ],
)  # fmt: skip
def test_precision_is_what_is_faster_on_all_ranks(demo: Path, faster: Sequence[float], precision: str, tokens: int) -> None:
    """Batches are those that fit all in the chosen precision."""
    tried = [Tried(its, {"fp32": 1000 - number, "bf16": 4000 - number}) for number, its in enumerate(faster)]
    config, said = with_device(bare(demo), tried)
    assert (config.precision, config.batch.tokens) == (precision, tokens)
    assert said[0].startswith(f"precision {precision}, because")
    assert "inf" not in said[0]


@pytest.mark.parametrize(
    ("preset", "tokens", "accumulate", "rate"),
    [("base", 25_000, 1, 7e-4), ("base", 25_000, 16, 1.4e-3), ("base", 6250, 1, 3.5e-4), ("tiny", 512, 4, 6e-3)],
)
def test_the_rate_grows_with_the_tokens_of_an_update(
    demo: Path, preset: str, tokens: int, accumulate: int, rate: float
) -> None:
    config = bare(demo, model={"preset": preset}, batch={"tokens": tokens, "accumulate": accumulate}, mode="single")
    config, said = with_mode(config, pairs(100), (0,))
    assert config.optimizer.learning_rate == pytest.approx(rate)
    assert config.optimizer.warmup == RECIPES[preset].warmup
    assert f"preset {preset} and {tokens * accumulate:,} tokens per update" in said[0]


@pytest.mark.parametrize(("mode", "tokens"), [("sync", 4 * 640), ("vanilla", 640), ("local-sgd", 640)])
def test_only_workers_that_share_an_update_make_it_larger(demo: Path, mode: str, tokens: int) -> None:
    config = bare(demo, model={"preset": "tiny"}, batch={"sentences": 64}, mode=mode)
    assert f"and {tokens:,} tokens per update" in with_mode(config, pairs(100), (0, 1, 2, 3))[1][0]


def test_rates_of_other_optimizers_are_their_own(demo: Path) -> None:
    config = bare(demo, model={"preset": "tiny"}, batch={"tokens": 2048}, mode="downpour")
    assert with_mode(config, pairs(100), (0, 1))[0].optimizer.learning_rate == 0.02


def test_fine_tuning_has_a_fifth_of_the_rate_and_a_short_warm_up(demo: Path) -> None:
    config = bare(demo, model={"preset": "base"}, batch={"tokens": 25_000}, mode="single", init="another")
    config, said = with_mode(config, pairs(100), (0,))
    assert (config.optimizer.learning_rate, config.optimizer.warmup) == (pytest.approx(1.4e-4), 200)
    assert "less for fine-tuning" in said[0]


def test_factors_of_low_rank_have_the_whole_rate_and_a_short_warm_up(demo: Path) -> None:
    model = {"preset": "base", "lora_rank": 8}
    config, _ = with_mode(bare(demo, model=model, batch={"tokens": 25_000}, mode="single", init="another"), pairs(100), (0,))
    assert (config.optimizer.learning_rate, config.optimizer.warmup) == (7e-4, 200)


@pytest.mark.parametrize(
    ("each", "memory", "found"), [(1.0, 1e9, 4096), (100.0, 204_900.0, 2049), (100.0, 15_000.0, 150), (100.0, 9000.0, 0)]
)
def test_the_largest_batch_that_fits(each: float, memory: float, found: int) -> None:
    """A step needs 0 bytes and `each` for every token; where there is less than 1.5 times of the memory, it fails."""
    tried = []

    def needs(tokens: int) -> float:
        tried.append(tokens)
        return tokens * each if tokens * each < 1.5 * memory else math.inf

    assert fit(needs, 101, 4096, memory) == found
    assert len(tried) <= 8


def test_a_device_that_no_batch_fits_is_refused(demo: Path) -> None:
    with pytest.raises(UserError, match="not even a batch of 101 target tokens fits a device"):
        with_device(bare(demo), [Tried(0.0, {"fp32": 0, "bf16": 0})])


def test_a_cpu_has_room_for_the_longest_sentence(demo: Path) -> None:
    values = plain(bare(demo))
    values["corpus"]["max_length"] = 3000
    config, _ = without_device(configuration.validate(values, {}), pairs(100), (0,))
    assert config.batch.tokens == 3001


def saved(config: Config) -> Checkpoint:
    return SimpleNamespace(facts={"config": plain(config)})  # type: ignore[return-value]


def test_a_run_that_has_begun_keeps_what_was_decided(demo: Path) -> None:
    values = {"precision": "bf16", "model.preset": "base", "optimizer.learning_rate": 0.5, "replicas.algorithm": "ring"}
    before = configuration.with_values(bare(demo, batch={"tokens": 333}, optimizer={"warmup": 7}), values)
    assert differences(plain(before), bare(demo)) == []
    config, said = without_device(bare(demo), pairs(100), (0,), saved(before))
    assert config == before
    assert said == [
        "precision bf16, batch.tokens 333, model.preset base, optimizer.learning_rate 0.5, optimizer.warmup 7:"
        " as in the run so far"
    ]
    other = bare(demo, model={"preset": "small"})
    assert "model.dim was 512, now 256" in differences(plain(before), other)


def test_a_new_run_has_the_model_that_init_names(demo: Path) -> None:
    initial = bare(demo, model={"preset": "base", "ffn_dim": 96})
    config, _ = without_device(bare(demo), pairs(100), (0,), initial=saved(initial))
    assert (config.model.preset, config.model.dim, config.model.ffn_dim) == ("base", 512, 96)
    assert config.undecided == ()


def test_with_init_all_that_the_section_model_does_not_give_is_as_in_that_model(demo: Path) -> None:
    there = {"preset": "base", "ffn_dim": 96, "norm": "post", "dropout": 0.25, "label_smoothing": 0.0, "output_bias": True,
             "guided_alignment": {"layer": 2, "weight": 0.5}}  # fmt: skip
    corpus = {"train": [{"files": ["a", "b"], "alignments": "c"}], "valid": ["a", "b"]}
    initial, own = bare(demo, model=there, corpus=corpus), {"dropout": 0.5, "heads": 4, "lora_rank": 2}
    config, said = without_device(bare(demo, init="other", model=own), pairs(100), (0,), initial=saved(initial))
    without_alignments = {"guided_alignment": {"layer": 2, "weight": 0.0}}
    assert plain(config)["model"] == {**plain(initial)["model"], **own, **without_alignments}
    assert config.undecided == ()
    assert said[0] == (
        "model.preset base, model.ffn_dim 96, model.norm post, model.output_bias true, model.label_smoothing 0,"
        " model.guided_alignment.layer 2, model.guided_alignment.weight 0: as in the model that init names"
    )


@pytest.mark.parametrize(("weight", "given", "used"), [(0.5, {}, 0.5), (0.0, {}, 0.05), (0.0, {"weight": 0.0}, 0.0)])
def test_with_alignments_the_head_that_init_names_learns_on(
    demo: Path, weight: float, given: dict[str, Any], used: float
) -> None:
    corpus = {"train": [{"files": ["a", "b"], "alignments": "c"}], "valid": ["a", "b"]}
    initial = saved(bare(demo, model={"preset": "tiny", "guided_alignment": {"layer": 3, "weight": weight}}, corpus=corpus))
    config = bare(demo, init="other", corpus=corpus, model={"guided_alignment": given})
    guided = without_device(config, pairs(100), (0,), initial=initial)[0].model.guided_alignment
    assert (guided.layer, guided.weight) == (3, used)
    with pytest.raises(UserError, match="has alignments, but no attention head learns them"):
        without_device(config, pairs(100), (0,), initial=saved(bare(demo, model={"preset": "tiny"})))


def test_with_init_separate_vocabularies_do_not_decide_what_is_tied(demo: Path) -> None:
    corpus = plain(bare(demo))["corpus"] | {"vocabulary": {"path": ["a", "b"]}}
    assert "model.tied" in bare(demo, init="other", corpus=corpus).undecided
    assert bare(demo, corpus=corpus).model.tied == "target-output"


@pytest.mark.parametrize("init", [None, "other"])
def test_all_ranks_get_the_same(demo: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, init: str | None) -> None:
    config, initial = bare(demo, mode="sync", init=init), saved(bare(demo, model={"preset": "tiny", "norm": "post"}))
    stores = open_stores(config.corpus, vocabulary, demo / "store")
    monkeypatch.setattr(defaults, "_try", lambda *given: Tried(faster=2.0, tokens={"fp32": 1, "bf16": next(sizes)}))
    sizes = iter((3000, 2000, 2500))

    def one(transport: VirtualTransport) -> Config:
        if transport.rank:
            return follow_mode(follow(config, transport, CPU, vocabulary, stores), transport)
        begun = lead(config, transport, CPU, vocabulary, stores, None, initial if init else None, print)[0]
        return lead_mode(begun, transport, stores, False)[0]

    found = together(engine([1, 1, 1]), *[one] * 3)
    assert found[0] == found[1] == found[2]
    assert (found[0].precision, found[0].batch.tokens, found[0].undecided) == ("bf16", 2000, ())
    assert found[0].model.norm == ("post" if init else "pre")


@pytest.mark.slow
def test_a_bare_configuration_trains_and_resumes_and_says_what_was_decided(make: Make, demo: Path, tmp_path: Path) -> None:
    config = replace(bare(demo, stop={"after": "2u"}, devices="cpu", threads=1), run=str(tmp_path / "run"))
    assert start(config, force=False, overwrite=False) == 0
    written = configuration.load([str(tmp_path / "run" / "config.yml")], {})
    assert written.undecided == ()
    log = (tmp_path / "run" / "train.log").read_text(encoding="utf-8")
    for said in ("model.preset tiny", f"precision {written.precision}", "batch.tokens 2,048", "optimizer.learning_rate 0.006"):
        assert f"decided: {said}" in log
        assert f"# decided: {said}" in (tmp_path / "run" / "config.yml").read_text(encoding="utf-8")
    longer = replace(
        config, stop=replace(config.stop, after=configuration.validate(plain(make(stop__after="3u")), {}).stop.after)
    )
    assert start(longer, force=False, overwrite=False) == 0
    assert last(config).facts["progress"]["updates"] == 3


@pytest.mark.slow
def test_a_simulated_run_does_not_depend_on_this_machine(demo: Path, tmp_path: Path) -> None:
    config = replace(bare(demo, stop={"after": "2u"}, mode="sync", threads=1), run=str(tmp_path / "run"))
    assert simulate(config, cluster([1, 1]), False, False) == 0
    written = configuration.load([str(tmp_path / "run" / "config.yml")], {})
    assert (written.precision, written.batch.tokens, written.model.preset) == ("fp32", 2048, "tiny")
