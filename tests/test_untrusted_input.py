"""Files and messages from anybody: whatever they hold, only sentences for users come out, and memory is bounded.

NMT_TRAIN_EXAMPLES says how many of each kind are tried.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from codecs_to_test import CODECS, ROUNDED
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt_train import config
from nmt_train.common.errors import UserError
from nmt_train.common.message import DTYPES, Malformed, Message, from_bytes, from_json, to_facts, to_json
from nmt_train.corpus.data_shard import Position
from nmt_train.corpus.text import read_pairs
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.load_model import load_model
from nmt_train.model.transformer import Transformer
from nmt_train.optim.flat_model import FlatModel
from nmt_train.run import checkpoint, manifest
from nmt_train.run.progress import Progress
from nmt_train.run.stopping import Patience
from nmt_train.simulation import cluster_file
from nmt_train.strategy.recovery_piece import RecoveryPiece
from nmt_train.training.control import Report
from nmt_train.training.leader_state import LeaderState, named_generators
from nmt_train.training.rank_stats import Totals
from nmt_train.training.snapshot import Header
from nmt_train.transport import Tag
from nmt_train.transport.mpi.framing import pack, unpack

fuzzed = settings(max_examples=int(os.environ.get("NMT_TRAIN_EXAMPLES", "150")), derandomize=True)
TAGS, LONGEST = frozenset(Tag), 1 << 20
WHOLE = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 40)
TEXTS = st.text(max_size=8) | st.sampled_from(["1e", "-5", "1e999", "~", "0x"])
SCALARS = st.none() | st.booleans() | WHOLE | st.floats() | TEXTS
JSON = st.recursive(SCALARS, lambda its: st.lists(its, max_size=4) | st.dictionaries(st.text(max_size=6), its, max_size=4))


def sentence(action: Callable[[], Any]) -> None:
    """It works, or says in one sentence why not."""
    try:
        action()
    except UserError as error:
        assert str(error)


# The transport


@fuzzed
@given(words=st.lists(WHOLE, max_size=12), tail=st.binary(max_size=9))
def test_any_bytes_are_a_frame_or_malformed(words: list[int], tail: bytes) -> None:
    frame = np.frombuffer(np.array(words, np.int64).tobytes() + tail, np.uint8)
    sentence(lambda: unpack(frame, "rank 1", LONGEST, TAGS))


@fuzzed
@given(data=st.data(), numbers=st.lists(WHOLE, max_size=3), sizes=st.lists(st.integers(0, 20), max_size=3))
def test_a_frame_of_which_a_word_was_changed_is_another_frame_or_malformed(
    data: st.DataObject, numbers: list[int], sizes: list[int]
) -> None:
    slot = data.draw(st.integers(0, 1))
    frame = pack(Tag.PUSH, slot, Message(tuple(numbers), tuple(torch.zeros(size) for size in sizes))).copy()
    frame.view(np.int64)[data.draw(st.integers(0, frame.size // 8 - 1))] = data.draw(WHOLE)
    sentence(lambda: unpack(frame, "rank 1", LONGEST, TAGS))


def test_a_frame_that_says_that_more_follows_than_is_allowed_is_refused_before_memory_is_taken() -> None:
    header = np.array([Tag.STATE, 1, 0, 2, 0, 1 << 19, DTYPES.index(torch.float64), 1 << 60], np.int64).view(np.uint8)
    with pytest.raises(Malformed, match="a message from rank 3 is not as it should be"):
        unpack(header, "rank 3", LONGEST, TAGS)
    header.view(np.int64)[-1] = 1 << 16
    with pytest.raises(Malformed, match="1,048,576 bytes, more than transport.longest"):
        unpack(header, "rank 3", LONGEST - 1, TAGS)
    unpack(header, "rank 3", LONGEST, TAGS)


@pytest.mark.parametrize("tag", [99, -1, 254])
def test_a_tag_that_nobody_knows_is_refused(tag: int) -> None:
    with pytest.raises(Malformed, match=f"tag {tag}"):
        unpack(pack(tag, 0, Message((1,))), "rank 1", LONGEST, TAGS)


VECTORS = st.builds(
    lambda dtype, values: torch.tensor(values).to(dtype), st.sampled_from(DTYPES), st.lists(st.integers(-300, 300), max_size=60)
)


@pytest.mark.slow
@fuzzed
@given(data=st.data())
def test_any_message_is_a_report_or_malformed(data: st.DataObject) -> None:
    known = Totals.of({"sent": {"push": [1, 2]}, "spent": {"MainThread": {"forward": 0.5}}})
    report = Report(dict.fromkeys(Progress().take(), 0), Position(), Position(), 1, known, said="skipped")
    sent = report.pack(data.draw(st.sampled_from([known, Totals.of({})])))
    numbers, tensors = data.draw(st.lists(WHOLE, max_size=18) | st.just(list(sent.numbers))), list(sent.tensors)
    if data.draw(st.booleans()):
        tensors[-1] = data.draw(VECTORS | st.builds(lambda value: from_json(value).tensors[0], JSON | st.builds(
            lambda form: {"form": form}, JSON)))  # fmt: skip
    sentence(lambda: Report.unpack(Message(tuple(numbers), tuple(tensors)), known).totals.nested())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CODECS, *ROUNDED])
@fuzzed
@given(numbers=st.lists(WHOLE, max_size=3), tensors=st.lists(VECTORS, max_size=3), elements=st.integers(0, 60))
def test_any_message_is_decoded_or_malformed(name: str, numbers: list[int], tensors: list[torch.Tensor], elements: int) -> None:
    codec, message = (CODECS | ROUNDED)[name](), Message(tuple(numbers), tuple(tensors))
    sentence(lambda: codec.decode(message, torch.zeros(elements)))
    sentence(lambda: codec.add(message, torch.zeros(elements)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CODECS, *ROUNDED])
@fuzzed
@given(data=st.data(), elements=st.integers(1, 300))
def test_a_message_that_was_changed_is_decoded_or_malformed(name: str, data: st.DataObject, elements: int) -> None:
    codec = (CODECS | ROUNDED)[name]()
    torch.manual_seed(1)  # some round at random
    message = codec.encode(torch.linspace(-1, 1, elements), 20)
    numbers, tensors = list(message.numbers), [tensor.clone() for tensor in message.tensors]
    if numbers and data.draw(st.booleans()):
        numbers[data.draw(st.integers(0, len(numbers) - 1))] = data.draw(WHOLE)
    else:
        place = data.draw(st.integers(0, len(tensors) - 1))
        changed = tensors[place].view(torch.uint8)
        if changed.numel() and data.draw(st.booleans()):
            changed[data.draw(st.integers(0, changed.numel() - 1))] = data.draw(st.integers(0, 255))
        else:
            tensors[place] = tensors[place][: data.draw(st.integers(0, tensors[place].numel()))]
    sentence(lambda: codec.add(Message(tuple(numbers), tuple(tensors)), torch.zeros(elements)))


OF_ALL = [name for name in (*CODECS, *ROUNDED) if not name.startswith(("threshold", "top-k"))]  # not only of some elements


@pytest.mark.parametrize(
    ("name", "elements"),
    [(name, elements) for name in (*CODECS, *ROUNDED) for elements in (0, 1, 400, 1025) if elements < 2 or name in OF_ALL],
)
def test_a_message_for_a_longer_or_shorter_vector_is_malformed(name: str, elements: int) -> None:
    codec = (CODECS | ROUNDED)[name]()
    message = codec.encode(torch.linspace(-1, 1, 512), 20)
    with pytest.raises(Malformed):
        codec.add(message, torch.zeros(elements))


@fuzzed
@given(value=JSON, tensors=st.lists(VECTORS, max_size=3))
def test_any_message_is_facts_a_part_and_a_piece_or_malformed(value: Any, tensors: list[torch.Tensor]) -> None:
    message = Message((), (*from_json(value).tensors, *tensors))
    for action in (to_json, lambda its: to_facts(its, "do"), Header.unpack, RecoveryPiece.unpack):
        sentence(lambda action=action: action(message))  # type: ignore[misc]


@fuzzed
@given(data=st.binary(max_size=40))
def test_any_bytes_are_json_or_malformed(data: bytes) -> None:
    sentence(lambda: to_json(from_bytes(data)))


def test_a_message_without_a_vector_and_one_nested_too_deeply_are_malformed() -> None:
    with pytest.raises(Malformed):
        to_json(Message())
    with pytest.raises(Malformed):
        to_json(from_bytes(b"[" * 100_000))


# Files


def mutated(data: st.DataObject, value: Any) -> Any:
    """A value of which one part is another."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        if data.draw(st.integers(0, 4)) == 0:
            return {name: its for name, its in value.items() if name != key}
        return {**value, key: mutated(data, value[key])}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], mutated(data, value[place]), *value[place + 1 :]]
    return data.draw(JSON)


CONFIG = {
    "run": "run", "corpus": {"train": ["a", "b"], "valid": ["a", "b"], "vocabulary": {"size": 100}}, "mode": "overlap",
    "optimizer": {"learning_rate": 0.1, "beta1": 0.9}, "stop": {"after": "3e"}, "server": {"join": {2: "0u"}, "up": "half"},
    "validation": {"every": "2e", "metrics": ["bleu"]}, "devices": "cpu x 2",
}  # fmt: skip
CLUSTER = {
    "nodes": [1, 2], "device": {"forward": {"seconds": "1ms", "per_unit": "2us"}}, "jitter": 0.1, "loss": 0.1,
    "network": {"bandwidth": "1 Gbit/s", "latency": "1ms"}, "inside": {"bandwidth": "1 GB/s"}, "scale": {"parameters": "10M"},
    "stragglers": [{"rank": 0, "factor": 2}], "kills": [{"rank": 1, "at": "3s"}],
    "cuts": [{"node": 1, "at": "1s", "until": "2s"}],
}  # fmt: skip
READERS = {"config": (CONFIG, lambda path: config.load([str(path)], {})), "cluster": (CLUSTER, cluster_file.load)}


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", READERS)
@fuzzed
@given(data=st.data())
def test_any_keys_and_values_are_settings_or_said_to_be_wrong(folder: Path, kind: str, data: st.DataObject) -> None:
    values, read = READERS[kind]
    path = folder / f"{kind}.yml"
    path.write_text(yaml.safe_dump(mutated(data, values), allow_unicode=True), encoding="utf-8")
    sentence(lambda: read(path))


@pytest.mark.parametrize("kind", READERS)
@fuzzed
@given(content=st.binary(max_size=60) | st.text(alphabet="ab:-[]{}&*!?|>'\"%#, \n\t1.~", max_size=60).map(str.encode))
def test_any_file_is_settings_or_said_to_be_wrong(folder: Path, kind: str, content: bytes) -> None:
    path = folder / f"{kind}.yml"
    path.write_bytes(content)
    sentence(lambda: READERS[kind][1](path))


@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_repeats_itself_without_end_or_is_huge_is_refused(folder: Path, kind: str) -> None:
    path = folder / f"{kind}.yml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(UserError, match="more than 100,000 entries"):
        READERS[kind][1](path)
    path.write_text("a: " + "x" * (1 << 20), encoding="utf-8")
    with pytest.raises(UserError, match="more than 1,048,576 bytes"):
        READERS[kind][1](path)


BOMB = "{a0: &a0 [x, x, x, x, x, x, x, x, x, x], " + ", ".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)
) + "}"  # fmt: skip


@pytest.mark.slow
def test_text_on_the_command_line_or_in_a_value_that_repeats_itself_without_end_is_refused(folder: Path) -> None:
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    for name in ("devices", "server.join"):
        with pytest.raises(UserError, match=f"command line: {name}: has more than 100,000 entries"):
            config.load([str(path)], {name: BOMB})
    with pytest.raises(UserError, match="server.join: .*has more than 100,000 entries"):
        config.validate({**CONFIG, "server": {"join": BOMB}}, {})
    with pytest.raises(UserError, match="server.join: .*nested too deeply"):
        config.validate({**CONFIG, "server": {"join": "[" * 10_000}}, {})


@pytest.mark.slow
@pytest.mark.parametrize("text", ["!!int x", "!!python/object:os.system x", "&a [*a]", "[" * 10_000, "a: b: c"])
def test_any_text_on_the_command_line_is_a_setting_or_said_to_be_wrong(folder: Path, text: str) -> None:
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    for name in ("run", "devices", "server.join", "stop.after"):
        sentence(lambda name=name: config.load([str(path)], {name: text}))  # type: ignore[misc]


@fuzzed
@given(left=st.binary(max_size=60), right=st.binary(max_size=60), packed=st.booleans(), damage=st.integers(0, 200))
def test_any_files_are_a_corpus_or_said_to_be_wrong(folder: Path, left: bytes, right: bytes, packed: bool, damage: int) -> None:
    files = [str(folder / f"{name}{'.gz' if packed else ''}") for name in ("left", "right")]
    for file, content in zip(files, (left, right), strict=True):
        written = gzip.compress(content) if packed else content
        Path(file).write_bytes(written[:damage] + written[damage + 1 :])  # a byte is missing
    for given_files in (files, files[:1]):
        sentence(lambda given_files=given_files: list(read_pairs(given_files, "corpus.train")))  # type: ignore[misc]


@pytest.fixture(scope="module")
def saved(vocabulary: Vocabulary, folder: Path) -> tuple[Path, Transformer, Vocabulary]:
    """A checkpoint of a run, its model, and its vocabulary."""
    written = folder / "config.yml"
    written.write_text(yaml.safe_dump(CONFIG | {"model": {"preset": "tiny"}}), encoding="utf-8")
    settled = config.load([str(written)], {})
    model = Transformer(settled.model, len(vocabulary))
    flat = FlatModel(model)
    state = LeaderState(Progress(updates=5), Patience(settled.stop), vocabulary)
    numbers = {"updates": 5, "torch": {"step": 5.0}}
    random = [{"cpu": torch.get_rng_state()}]
    tensors = {"parameters": flat.named(flat.parameters), "optimizer": {}, "random": named_generators(random)}
    checkpoint.save(folder / "5", tensors, {**state.facts(numbers, settled), "stages": [[[1, 2]]]}, vocabulary)
    return folder / "5", model, vocabulary


def go_on(path: Path, model: Transformer, vocabulary: Vocabulary) -> None:
    state = LeaderState(Progress(), Patience(config.validate(CONFIG, {}).stop), vocabulary)
    state.load(manifest.load_verified(path), FlatModel(model), False)


def test_a_manifest_of_which_anything_was_changed_is_found_by_its_checksum(saved: tuple[Path, Transformer, Vocabulary]) -> None:
    path, model, vocabulary = saved
    file = path / "checkpoint.json"
    before = file.read_text(encoding="utf-8")
    go_on(path, model, vocabulary)
    try:
        file.write_text(before.replace('"updates": 5', '"updates": 6', 1), encoding="utf-8")
        with pytest.raises(UserError, match="checkpoint.json: was changed since it was saved; use another"):
            go_on(path, model, vocabulary)
    finally:
        file.write_text(before, encoding="utf-8")


@pytest.mark.slow
@fuzzed
@given(data=st.data())
def test_any_manifest_is_gone_on_from_or_said_to_be_wrong(
    saved: tuple[Path, Transformer, Vocabulary], data: st.DataObject
) -> None:
    path, model, vocabulary = saved
    file = path / "checkpoint.json"
    before = file.read_text(encoding="utf-8")
    facts = mutated(data, copy.deepcopy(json.loads(before)))
    if isinstance(facts, dict) and data.draw(st.booleans()):
        facts.pop("checksum", None)
        if data.draw(st.booleans()):
            facts["checksum"] = checkpoint._checksum(facts)  # whoever changes it can do that too
    try:
        file.write_text(json.dumps(facts), encoding="utf-8")
        sentence(lambda: go_on(path, model, vocabulary))
    finally:
        file.write_text(before, encoding="utf-8")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stages", []), ("stages", [[]]), ("stages", [[[1, 2]], []]), ("stages", [[[-1, 2]]]), ("stages", [[[1, -2]]]),
        ("stages", [[["1", "2"]]]), ("stages", [[[1]]]), ("stages", [[[1, 1 << 70]]]), ("stages", [[[1.5, 2]]]),
        ("progress", {"epochs": -1}), ("progress", {"tokens": float("nan")}), ("progress", {"seconds": "1"}),
        ("optimizer", {"updates": -1, "torch": {}}), ("patience", {"bleu": [1.0, -1]}),
    ],
)  # fmt: skip
def test_a_manifest_with_wrong_numbers_is_refused(saved: tuple[Path, Transformer, Vocabulary], key: str, value: Any) -> None:
    def change(facts: dict[str, Any]) -> None:
        facts[key] = facts[key] | value if isinstance(value, dict) and key == "progress" else value

    with changed(saved[0], change), pytest.raises(UserError, match=f"its manifest is not as it should be: {key}"):
        manifest.load_verified(saved[0])


@contextlib.contextmanager
def changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> Iterator[None]:
    """Change the manifest of a checkpoint, and then restore it."""
    file = path / "checkpoint.json"
    before = file.read_text(encoding="utf-8")
    facts = json.loads(before)
    del facts["checksum"]
    change(facts)
    try:
        file.write_text(json.dumps(facts | {"checksum": checkpoint._checksum(facts)}), encoding="utf-8")
        yield
    finally:
        file.write_text(before, encoding="utf-8")


def test_a_model_can_be_read_if_other_keys_have_had_other_names(saved: tuple[Path, Transformer, Vocabulary]) -> None:
    with changed(saved[0], lambda facts: facts["config"]["validation"].update(normalisation=1.0)):
        load_model([saved[0]], torch.device("cpu"))


@pytest.mark.parametrize("model", [None, 3, {"dim": "wide"}, {"dims": 6}, {"dim": 7, "heads": 7}])
def test_a_manifest_without_a_valid_model_section_is_refused(saved: tuple[Path, Transformer, Vocabulary], model: Any) -> None:
    with (
        changed(saved[0], lambda facts: facts["config"].update(model=model)),
        pytest.raises(UserError, match="the configuration of its model"),
    ):
        load_model([saved[0]], torch.device("cpu"))


_VALUES = st.none() | st.text(max_size=9) | st.lists(st.text(max_size=3), max_size=6) | st.integers()
_FIELDS = st.dictionaries(st.sampled_from(["source", "target", "pieces"]), _VALUES) | _VALUES
PAIRS = _FIELDS.map(lambda held: b"nmt_train: two SentencePiece models\n" + json.dumps(held).encode())


@fuzzed
@given(content=st.binary(max_size=200) | PAIRS)
def test_any_file_is_a_vocabulary_or_said_not_to_be_one(content: bytes) -> None:
    sentence(lambda: Vocabulary.read(content, "vocabulary.model"))


def test_vectors_that_the_manifest_does_not_know_are_not_looked_at(saved: tuple[Path, Transformer, Vocabulary]) -> None:
    path, model, vocabulary = saved
    strange = path / "worker-0.safetensors"
    strange.write_bytes((path / "parameters.safetensors").read_bytes())
    try:
        assert not manifest.load_verified(path).has("worker-0")
        go_on(path, model, vocabulary)
    finally:
        strange.unlink()


def test_the_examples_above_are_right_as_they_are(folder: Path) -> None:
    for kind, (values, read) in READERS.items():
        path = folder / f"right-{kind}.yml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        read(path)
