"""Models of Marian: read as ours, they score as a reference in numpy does; written again, they are the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import marian_reference as reference
import numpy as np
import pytest
import torch
import yaml
from conftest import Make
from hypothesis import given, settings
from hypothesis import strategies as st
from models import random_model
from simulated import AT_ONCE, events, run

from nmt_train import cli
from nmt_train.cli import export, import_model
from nmt_train.common.errors import UserError
from nmt_train.corpus.batch import assemble
from nmt_train.corpus.text import read_lines
from nmt_train.corpus.vocabulary import SOURCE, TARGET, Vocabulary
from nmt_train.load_model import load_model
from nmt_train.model.beam_search import SearchConfig
from nmt_train.model_formats import huggingface, marian_npz, marian_vocabulary

ARCHITECTURES = [
    {},
    {"transformer-ffn-activation": "relu", "output-omit-bias": True},
    reference.PRE_NORM,
    {**reference.PRE_NORM, "transformer-heads": 2, "enc-depth": 1, "dec-depth": 1},
    {"tied-embeddings-all": False, "tied-embeddings-src": True, "tied-embeddings": True},
    {"tied-embeddings-all": False, "tied-embeddings": True},
    {"tied-embeddings-all": False},
]
SEPARATE = [
    {"tied-embeddings-all": False, "tied-embeddings": True},
    {**reference.PRE_NORM, "tied-embeddings-all": False, "output-omit-bias": True},
]


@pytest.fixture(scope="module")
def lines(demo: Path) -> tuple[list[str], list[str]]:
    sources, targets = ([*read_lines(demo / f"train.{language}")][:200] for language in ("en", "de"))
    return [*sources, "an unknown 漢", "two  spaces"], [*targets, "ein unbekanntes 漢", "zwei  Leerzeichen"]


@pytest.fixture(scope="module")
def shared(lines: tuple[list[str], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.train_vocabulary(lines[0][:200] + lines[1][:200], tmp_path_factory.mktemp("shared") / "vocab.spm", 150)


@pytest.fixture(scope="module")
def separate(lines: tuple[list[str], list[str]], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("separate")
    sides = zip(("source.spm", "target.spm"), lines, (120, 100), strict=True)
    return [reference.train_vocabulary(side[:200], folder / name, size) for name, side, size in sides]


class Made:
    """A random model in Marian's format; `ours` is what nmt-import makes of it."""

    def __init__(self, folder: Path, vocabularies: list[Path], changes: dict[str, Any]) -> None:
        self.vocabularies = vocabularies
        self.pieces = [reference.pieces_of(path) for path in (vocabularies[0], vocabularies[-1])]
        sizes = [len(pieces) for pieces in self.pieces]
        self.options = {**reference.OPTIONS, **changes, "dim-vocabs": sizes}
        self.arrays = reference.random_arrays(self.options, *sizes)
        self.path = reference.save(self.arrays, self.options, folder / "model.npz")
        self.ours = folder / "ours"

    def bring_in(self) -> Path:
        assert call(import_model, self.path, self.ours, "--vocab", *self.vocabularies) == 0
        return self.ours

    def scores(self, sources: list[str], targets: list[str]) -> list[float]:
        ids = [[[*pieces.encode(line), pieces.eos_id()] for line in side]
               for pieces, side in zip(self.pieces, (sources, targets), strict=True)]  # fmt: skip
        return [reference.score(self.arrays, self.options, *pair) for pair in zip(*ids, strict=True)]


def call(command: Any, *arguments: Any) -> int:
    return cli.run(command.command, [str(argument) for argument in arguments])


def our_scores(checkpoint: Path, sources: list[str], targets: list[str]) -> list[float]:
    model, vocabulary, _ = load_model([checkpoint], torch.device("cpu"))
    sides = ((sources, SOURCE), (targets, TARGET))
    batch = assemble(*([np.array(ids) for ids in vocabulary.encode(lines, side)] for lines, side in sides))
    with torch.inference_mode():
        return model.log_probabilities(batch).tolist()


def read_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("changes", ARCHITECTURES, ids=str)
def test_an_imported_model_scores_as_marian_does(
    shared: Path, lines: tuple[list[str], list[str]], tmp_path: Path, changes: dict[str, Any]
) -> None:
    made = Made(tmp_path, [shared], changes)
    sources, targets = (side[-8:] for side in lines)
    assert our_scores(made.bring_in(), sources, targets) == pytest.approx(made.scores(sources, targets), abs=1e-3, rel=1e-5)


@pytest.mark.parametrize("changes", SEPARATE, ids=str)
def test_so_does_one_with_a_vocabulary_for_each_side(
    separate: list[Path], lines: tuple[list[str], list[str]], tmp_path: Path, changes: dict[str, Any]
) -> None:
    made = Made(tmp_path, separate, changes)
    sources, targets = (side[-8:] for side in lines)
    sources.append("ü is a piece of the target only")
    targets.append("x is a piece of the source only")
    assert our_scores(made.bring_in(), sources, targets) == pytest.approx(made.scores(sources, targets), abs=1e-3, rel=1e-5)


def test_embeddings_tied_between_the_inputs_only_and_the_output_matrix_of_early_versions_are_read(
    shared: Path, lines: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    made = Made(tmp_path, [shared], {"tied-embeddings-all": False, "tied-embeddings-src": True})
    arrays = dict(made.arrays)
    arrays["decoder_ff_logit_out_W"] = arrays.pop("decoder_ff_logit_out_Wt").T
    reference.save(arrays, made.options, made.path)
    sources, targets = (side[-4:] for side in lines)
    assert our_scores(made.bring_in(), sources, targets) == pytest.approx(made.scores(sources, targets), abs=1e-3, rel=1e-5)


@pytest.mark.parametrize("changes", [changes for changes in ARCHITECTURES if "transformer-preprocess" not in changes], ids=str)
def test_a_model_that_was_imported_leaves_with_the_same_bits(shared: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    made = Made(tmp_path, [shared], changes)
    assert call(export, made.bring_in(), tmp_path / "back", "--to", "marian") == 0
    found = read_npz(tmp_path / "back" / "model.npz")
    del found["special:model.yml"]
    assert found.keys() == made.arrays.keys()
    assert all(
        found[name].tobytes() == array.tobytes() and found[name].shape == array.shape for name, array in made.arrays.items()
    )
    assert (tmp_path / "back" / "vocab.spm").read_bytes() == shared.read_bytes()


def test_one_with_a_vocabulary_for_each_side_leaves_with_the_same_bits(separate: list[Path], tmp_path: Path) -> None:
    made = Made(tmp_path, separate, SEPARATE[0])
    assert call(export, made.bring_in(), tmp_path / "back", "--to", "marian") == 0
    found = read_npz(tmp_path / "back" / "model.npz")
    assert all(found[name].tobytes() == array.tobytes() for name, array in made.arrays.items())
    for path in separate:
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    assert yaml.safe_load((tmp_path / "back" / "decoder.yml").read_text())["vocabs"] == ["source.spm", "target.spm"]


def test_its_vocabulary_gives_the_same_pieces_and_texts(shared: Path, lines: tuple[list[str], list[str]]) -> None:
    vocabulary, order, _ = marian_vocabulary.read([shared])
    pieces = reference.pieces_of(shared)
    for side in lines:
        ids = vocabulary.encode(side)
        assert [[order[i] for i in line] for line in ids] == pieces.encode(side)
        assert vocabulary.decode(ids[:200]) == pieces.decode(pieces.encode(side[:200]))
    assert vocabulary.can_resample(), "subword regularization works, as with sentencepiece-alphas in Marian"


def test_a_vocabulary_with_pieces_for_begin_and_padding_elsewhere_is_put_in_our_order(
    lines: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    path = reference.train_vocabulary(lines[0], tmp_path / "x.spm", 100, unk_id=0, bos_id=1, eos_id=2, pad_id=3)
    vocabulary, order, _ = marian_vocabulary.read([path])
    assert order[:5] == [3, 0, 1, 2, 4]
    assert len(vocabulary) == len(reference.pieces_of(path))


@pytest.mark.parametrize("tied", ["all", "target-output", "none"])
@pytest.mark.parametrize("more", [{}, {"activation": "swish", "output_bias": True}], ids=str)
def test_a_model_trained_here_scores_the_same_in_marian(
    vocabulary: Vocabulary, lines: tuple[list[str], list[str]], tmp_path: Path, tied: str, more: dict[str, Any]
) -> None:
    model = random_model(len(vocabulary), "post", tied, conventions="marian", **more)
    marian_npz.write(model, vocabulary, SearchConfig(), tmp_path)
    arrays = read_npz(tmp_path / "model.npz")
    options = yaml.safe_load(arrays.pop("special:model.yml").tobytes().rstrip(b"\0"))
    pieces = reference.pieces_of(tmp_path / "vocab.spm")
    assert (pieces.eos_id(), pieces.unk_id(), pieces.bos_id(), pieces.pad_id()) == (0, 1, -1, -1)
    sides = [side[-8:] for side in lines]
    theirs = [[[*pieces.encode(line), 0] for line in side] for side in sides]
    batch = assemble(*([np.array(ids) for ids in vocabulary.encode(side)] for side in sides))
    with torch.inference_mode():
        found = model.log_probabilities(batch).tolist()
    wanted = [reference.score(arrays, options, *pair) for pair in zip(*theirs, strict=True)]
    assert found == pytest.approx(wanted, abs=1e-3, rel=1e-5)


@pytest.mark.slow
def test_a_model_of_marian_is_fine_tuned_by_two_ranks_and_returns(
    make: Make, shared: Path, lines: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    ours = Made(tmp_path, [shared], {}).bring_in()
    folder = run(
        make, tmp_path / "run", [1, 1], places=AT_ONCE, mode="sync", init=str(ours), model={}, corpus__vocabulary={},
        stop__after="60u", validation__every="30u", optimizer__learning_rate=0.003,
    )  # fmt: skip
    scores = [event["cross-entropy"] for event in events(folder, "validation")]
    assert scores[0] > scores[1] > scores[2]
    assert call(export, folder, tmp_path / "back", "--to", "marian") == 0
    assert (tmp_path / "back" / "vocab.spm").read_bytes() == shared.read_bytes()
    arrays, pieces = read_npz(tmp_path / "back" / "model.npz"), reference.pieces_of(shared)
    options = yaml.safe_load(arrays.pop("special:model.yml").tobytes().rstrip(b"\0"))
    sources, targets = (side[-8:] for side in lines)
    theirs = [[[*pieces.encode(line), 0] for line in side] for side in (sources, targets)]
    wanted = [reference.score(arrays, options, *pair) for pair in zip(*theirs, strict=True)]
    assert our_scores((folder / "last").resolve(), sources, targets) == pytest.approx(wanted, abs=1e-3, rel=1e-5)


def test_fine_tuning_names_what_the_model_section_contradicts(make: Make, shared: Path, tmp_path: Path) -> None:
    from nmt_train.training.start import start

    ours = Made(tmp_path, [shared], {}).bring_in()
    with pytest.raises(UserError, match=r"needs model.output_bias True \(here False\), model.conventions marian \(here stand"):
        start(make(init=str(ours), model={"output_bias": False, "conventions": "standard"}), False, False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"type": "s2s"}, "type is 's2s'; only models with 'transformer' can be read"),
        ({"transformer-decoder-autoreg": "rnn"}, "transformer-decoder-autoreg is 'rnn'; only models with 'self-attention'"),
        ({"transformer-decoder-autoreg": "average-attention"}, "transformer-decoder-autoreg is 'average-attention'"),
        ({"transformer-ffn-activation": "gelu"}, "transformer-ffn-activation is 'gelu'; only models with 'swish' or 'relu'"),
        ({"transformer-ffn-depth": 3}, "transformer-ffn-depth is 3"),
        ({"transformer-decoder-ffn-depth": 1}, "transformer-decoder-ffn-depth is 1; only models with 0 or 2"),
        ({"transformer-decoder-dim-ffn": 8}, "transformer-decoder-dim-ffn is not transformer-dim-ffn"),
        ({"transformer-postprocess-emb": "n"}, "transformer-postprocess-emb is 'n'"),
        ({"transformer-preprocess": "n"}, "transformer-preprocess 'n', transformer-postprocess 'dan', transformer-post"),
        ({**reference.PRE_NORM, "transformer-postprocess-top": ""}, "transformer-postprocess-top ''; only models with"),
        ({"transformer-postprocess": "dhn"}, "transformer-postprocess 'dhn'"),
        ({"transformer-postprocess": "dar"}, "transformer-postprocess 'dar'"),
        ({"transformer-attention-mask": "alibi"}, "transformer-attention-mask is 'alibi'"),
        ({"transformer-train-position-embeddings": True}, "transformer-train-position-embeddings is True"),
        ({"transformer-disable-position-embeddings": True}, "transformer-disable-position-embeddings is True"),
        ({"transformer-no-projection": True}, "transformer-no-projection is True"),
        ({"transformer-no-bias": True}, "transformer-no-bias is True"),
        ({"transformer-no-affine": True}, "transformer-no-affine is True"),
        ({"transformer-pool": True}, "transformer-pool is True"),
        ({"transformer-tied-layers": [1, 1, 1]}, "transformer-tied-layers is [1, 1, 1]"),
        ({"input-types": ["sequence", "class"]}, "input-types is ['sequence', 'class']"),
        ({"lemma-dim-emb": 8}, "lemma-dim-emb is 8"),
        ({"factors-combine": "concat"}, "factors-combine is 'concat'"),
        ({"right-left": True}, "right-left is True"),
        ({"ulr": True}, "ulr is True"),
        ({"transformer-heads": 3}, "is not of a model that can be read: dim 16 is not a multiple of heads 3"),
        ({"enc-depth": "x"}, "its special:model.yml is not of a model that can be read: it should be a whole number"),
        ({"enc-depth": 3}, "parameter encoder_l3_self_Wq is missing"),
        ({"enc-depth": 1}, "parameter encoder_l2_ffn_W1 is not of a transformer as nmt_train has it"),
        ({"transformer-dim-ffn": 20}, "parameter encoder.0.ffn.inner.weight has the shape (24, 16), not (20, 16)"),
        ({"tied-embeddings-all": False}, "parameter Wemb is not of a transformer as nmt_train has it"),
        ({"output-omit-bias": True}, "parameter decoder_ff_logit_out_b is not of a transformer"),
    ],
)  # fmt: skip
def test_what_we_do_not_have_is_refused_by_the_name_of_marians_option(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    made = Made(tmp_path, [shared], {})
    reference.save(made.arrays, made.options | changes, made.path)
    assert call(import_model, made.path, made.ours, "--vocab", shared) == 2
    assert said in capsys.readouterr().err
    assert not made.ours.exists()


def spoil_array(name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[Made], None]:
    def spoil(made: Made) -> None:
        arrays = read_npz(made.path)
        changed = change(arrays.pop(name))
        np.savez(made.path, **arrays, **({} if changed is None else {name: changed}))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda made: made.path.unlink(), "model.npz: No such file or directory"),
        (lambda made: made.path.write_bytes(b"xx"), "not a .npz file, or damaged"),
        (lambda made: made.path.write_bytes(made.path.read_bytes()[:5000]), "not a .npz file, or damaged"),
        (lambda made: made.path.write_bytes(pickled()), "not a .npz file, or damaged (ValueError)"),
        (spoil_array("special:model.yml", lambda held: None), "has no special:model.yml"),
        (spoil_array("special:model.yml", lambda held: held[:0]), "its special:model.yml is damaged"),
        (spoil_array("special:model.yml", lambda held: np.frombuffer(b"a: [", np.int8)), "its special:model.yml is damaged"),
        (spoil_array("Wemb", lambda matrix: matrix.astype(np.int8)), "parameter Wemb is quantized"),
        (spoil_array("Wemb", lambda matrix: matrix[:-1]), "has embeddings of"),
        (spoil_array("Wemb", lambda matrix: matrix[0, 0]), "a parameter does not have the shape that its"),
        (spoil_array("encoder_l1_self_Wk", lambda matrix: matrix[0]), "a parameter does not have the shape that its"),
        (lambda made: made.vocabularies[0].write_bytes(b"xx"), "vocab.spm: not a SentencePiece model"),
        (lambda made: made.vocabularies[0].unlink(), "vocab.spm: No such file or directory"),
    ],
)  # fmt: skip
def test_a_damaged_file_has_its_sentence(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Made], Any], said: str
) -> None:
    copy = tmp_path / "vocab.spm"
    copy.write_bytes(shared.read_bytes())
    made = Made(tmp_path, [copy], {})
    spoil(made)
    assert call(import_model, made.path, made.ours, "--vocab", copy) == 2
    assert said in capsys.readouterr().err
    assert not made.ours.exists()


def pickled() -> bytes:
    import pickle

    return pickle.dumps(np.ones(3))


@pytest.mark.slow
@given(place=st.integers(0, 2**31), value=st.integers(0, 255))
@settings(max_examples=60)
def test_any_change_of_a_file_is_read_or_has_its_sentence(
    shared: Path, tmp_path_factory: pytest.TempPathFactory, place: int, value: int
) -> None:
    made = Made(tmp_path_factory.mktemp("changed"), [shared], {"enc-depth": 1, "dec-depth": 1})
    content = bytearray(made.path.read_bytes())
    content[place % len(content)] = value
    made.path.write_bytes(content)
    try:
        marian_npz.read(made.path, [shared])
    except UserError as error:
        assert str(made.path) in str(error)


def test_wrong_arguments_have_their_sentence(
    shared: Path, separate: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(tmp_path, [shared], {})

    def refused(*arguments: Any) -> str:
        assert call(import_model, *arguments) == 2
        assert not made.ours.exists()
        return capsys.readouterr().err

    assert "give its vocabulary (.spm), or those of source and target, with --vocab" in refused(made.path, made.ours)
    assert "give its vocabulary" in refused(made.path, made.ours, "--vocab", shared, shared, shared)
    assert "not a .npz file, which --vocab is for" in refused(tmp_path, made.ours, "--vocab", shared)
    assert "not a .npz file, which --vocab is for" in refused(tmp_path / "model.bin", made.ours, "--vocab", shared)
    assert "both sides share their embeddings; give --vocab one vocabulary" in refused(
        made.path, made.ours, "--vocab", *separate
    )
    assert "config.json: No such file or directory" in refused(tmp_path / "nothing", made.ours)
    for name in ("vocab.yml", "vocab.fsv"):
        assert f"{name}: only SentencePiece vocabularies (.spm) can be read" in refused(
            made.path, made.ours, "--vocab", tmp_path / name
        )


def test_a_vocabulary_of_another_model_or_without_an_end_is_refused(
    shared: Path, separate: list[Path], lines: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    made = Made(tmp_path, [shared], {})
    with pytest.raises(UserError, match=r"has embeddings of \d+ pieces, but .*source.spm \d+ pieces; give the vocabulary that"):
        marian_npz.read(made.path, separate[:1])
    endless = reference.train_vocabulary(lines[0], tmp_path / "endless.spm", 100, eos_id=-1, unk_id=0)
    with pytest.raises(UserError, match=r"endless.spm: has no piece for the end of a sentence"):
        marian_npz.read(made.path, [endless])


def test_a_model_with_the_standard_conventions_cannot_go_to_marian(vocabulary: Vocabulary, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train with model.norm: post and model.conventions: marian"):
        marian_npz.write(random_model(len(vocabulary)), vocabulary, SearchConfig(), tmp_path)


def test_a_pre_norm_model_cannot_go_to_marian_which_would_translate_wrongly(vocabulary: Vocabulary, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"marian-decoder would translate wrongly.*train with model.norm: post, or export to"):
        marian_npz.write(random_model(len(vocabulary), conventions="marian"), vocabulary, SearchConfig(), tmp_path)


def test_one_with_marians_conventions_cannot_go_to_hugging_face(vocabulary: Vocabulary, tmp_path: Path) -> None:
    model = random_model(len(vocabulary), conventions="marian")
    with pytest.raises(UserError, match=r"transformers has other sinusoids than Marian; export to ctranslate2 or to marian"):
        huggingface.write(model, vocabulary, SearchConfig(), tmp_path)


def test_the_folder_says_how_to_use_it(shared: Path, tmp_path: Path) -> None:
    made = Made(tmp_path, [shared], {})
    assert call(export, made.bring_in(), tmp_path / "back", "--to", "marian", "--beam", "4", "--normalization", "0.6") == 0
    assert {path.name for path in (tmp_path / "back").iterdir()} == {"README.md", "decoder.yml", "model.npz", "vocab.spm"}
    settings = yaml.safe_load((tmp_path / "back" / "decoder.yml").read_text())
    assert settings["beam-size"] == 4
    assert settings["normalize"] == 0.6
    assert settings["vocabs"] == ["vocab.spm"] * 2
    assert "marian-decoder -c decoder.yml" in (tmp_path / "back" / "README.md").read_text(encoding="utf-8")


def test_early_versions_of_marian_find_the_options_without_reading_on(shared: Path, tmp_path: Path) -> None:
    """They look for them from the beginning, and skip entries by sizes that are not in extensions of the format."""
    made = Made(tmp_path, [shared], {})
    assert call(export, made.bring_in(), tmp_path / "back", "--to", "marian") == 0
    content = (tmp_path / "back" / "model.npz").read_bytes()
    assert content[:4] == b"PK\x03\x04"
    assert int.from_bytes(content[28:30], "little") == 0, "no extension"
    assert content[30:].startswith(b"special:model.yml.npy")
