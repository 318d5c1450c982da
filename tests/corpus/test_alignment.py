"""Word alignments on their way from a file to the pieces of a batch."""

from __future__ import annotations

import gzip
import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import Make

from nmt_train.common.errors import UserError
from nmt_train.config import validate
from nmt_train.config_text import by_origin
from nmt_train.corpus import BatchConfig
from nmt_train.corpus.batch import Batch
from nmt_train.corpus.batches import Batches
from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.corpus.store import open_stores
from nmt_train.corpus.survey import Survey
from nmt_train.corpus.train_vocabulary import train
from nmt_train.corpus.vocabulary import END, SOURCE, TARGET, Vocabulary
from nmt_train.corpus.whole_words import WholeWords
from nmt_train.training.start import start

GUIDED = {"model__guided_alignment": {"layer": 1}}
PAIRS = [
    ("twelve boxes of milk", "zwölf Kisten Milch", "0-0 1-1 3-2"),
    ("the train leaves at six", "der Zug fährt um sechs ab", "0-0 1-1 2-2 2-5 3-3 4-4"),
    ("six", "sechs", ""),
    ("We buy seven bags", "Wir kaufen sieben Säcke", "0-0 0-1 1-0 1-1 3-3"),
]


def tsv(folder: Path, pairs: list[tuple[str, str, str]], name: str = "a") -> dict[str, Any]:
    """An entry of corpus.train with these pairs, and their alignments."""
    (folder / f"{name}.tsv").write_text("".join(f"{source}\t{target}\n" for source, target, _ in pairs), encoding="utf-8")
    (folder / f"{name}.links").write_text("".join(f"{links}\n" for *_, links in pairs), encoding="utf-8")
    return {"files": [f"{folder}/{name}.tsv"], "alignments": f"{folder}/{name}.links"}


def batches(make: Make, train: list[dict[str, Any]], vocabulary: Vocabulary, folder: Path, **changes: Any) -> Batches:
    corpus = make(corpus__train=train, **GUIDED, **changes).corpus
    return Batches(open_stores(corpus, vocabulary, folder / "store"), corpus, BatchConfig(tokens=500), vocabulary, 1)


def first(its: Batches) -> Batch:
    batch: Batch = next(its.stream(DataShard(), Position())).batch
    return batch


def shares(batch: Batch) -> torch.Tensor:
    """What the guided head should attend to (sentences, target, source)."""
    found = torch.zeros(*batch.target_out.shape, batch.source.shape[1])
    assert batch.links is not None
    assert batch.link_shares is not None
    assert len(batch.links.unique()) == len(batch.links)
    found.view(-1)[batch.links] = batch.link_shares
    return found


def words_of(vocabulary: Vocabulary, line: str) -> list[int]:
    """The whole word of each piece: each word is divided on its own."""
    return [number for number, ids in enumerate(vocabulary.encode(line.split())) for _ in ids]


def expected(vocabulary: Vocabulary, source: str, target: str, links: str, width: int) -> torch.Tensor:
    linked = {tuple(map(int, link.split("-"))) for link in links.split()}
    left, right = words_of(vocabulary, source), words_of(vocabulary, target)
    found = torch.tensor([[float((word, other) in linked) for word in left] for other in right])
    found /= found.sum(1, keepdim=True).clamp_min(1)
    return torch.nn.functional.pad(found, (0, width - len(left)))


def test_each_piece_of_a_linked_word_attends_equally_to_all_pieces_of_the_words_it_is_linked_with(
    make: Make, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    batch = first(batches(make, [tsv(tmp_path, PAIRS)], vocabulary, tmp_path))
    found = shares(batch)
    assert sorted(batch.pairs) == [0, 1, 2, 3]
    for row, pair in enumerate(batch.pairs):
        wanted = expected(vocabulary, *PAIRS[pair], found.shape[2])
        torch.testing.assert_close(found[row, : len(wanted)], wanted)
        assert not found[row, len(wanted) :].any(), "END and padding attend to nothing"
    assert max(np.bincount(words_of(vocabulary, PAIRS[1][0]))) > 1, "some words have several pieces"


def test_a_tag_moves_the_links_and_stays_without_any(make: Make, vocabulary: Vocabulary, tmp_path: Path) -> None:
    batch = first(batches(make, [{**tsv(tmp_path, PAIRS), "tag": "seven"}], vocabulary, tmp_path))
    found, tag = shares(batch), len(vocabulary.encode(["seven"])[0])
    for row, pair in enumerate(batch.pairs):
        wanted = expected(vocabulary, *PAIRS[pair], found.shape[2] - tag)
        torch.testing.assert_close(found[row, : len(wanted), tag:], wanted)
    assert not found[:, :, :tag].any()


def test_subword_sampling_and_noise_keep_the_links_of_words(make: Make, vocabulary: Vocabulary, tmp_path: Path) -> None:
    noise = {"typos": 0.5, "no_end": 1.0}
    pairs = [
        (f"{source} .", f"{target} .", f"{links} {len(source.split())}-{len(target.split())}")
        for source, target, links in PAIRS
    ]
    its = batches(make, [{**tsv(tmp_path, pairs), "noise": noise}], vocabulary, tmp_path, corpus__vocabulary={"sampling": 0.1})
    words, segmentations = WholeWords(vocabulary), set()
    for turn in islice(its.stream(DataShard(), Position()), 20):
        batch, found = turn.batch, shares(turn.batch)
        for row, pair in enumerate(batch.pairs):
            ids = [side[row][side[row] != END].numpy() for side in (batch.source, batch.target_out)]
            left, right = (words.of_ids(its[its != 0], side) for side, its in enumerate(ids))
            segmentations.add(tuple(ids[0].tolist()))
            linked = {(int(left[place]), int(right[other])) for other, place in found[row].nonzero().tolist()}
            wanted = {tuple(map(int, link.split("-"))) for link in PAIRS[pair][2].split()}
            assert linked == wanted, "the full stops, which are linked, are gone"
    assert len(segmentations) > 3 * len(PAIRS)


def test_several_corpora_with_and_without_alignments_and_files_in_parts(
    make: Make, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    for number, part in enumerate((PAIRS[:1], PAIRS[1:])):
        for column, name in enumerate(("en", "de", "links")):
            text = "".join(f"{pair[column]}\n" for pair in part).encode()
            (tmp_path / f"{number}.{name}.gz").write_bytes(gzip.compress(text))
    files = [[f"{tmp_path}/{number}.{name}.gz" for number in range(2)] for name in ("en", "de", "links")]
    plain = {"name": "plain", "files": tsv(tmp_path, PAIRS)["files"], "weight": 1}
    aligned = {"name": "aligned", "files": files[:2], "alignments": files[2], "weight": 1}
    batch = first(batches(make, [plain, aligned], vocabulary, tmp_path))
    found = shares(batch)
    assert max(batch.pairs) == 7
    for row, pair in enumerate(batch.pairs):
        wanted = expected(vocabulary, *PAIRS[pair % 4], found.shape[2]) * (pair >= 4)
        torch.testing.assert_close(found[row, : len(wanted)], wanted)


def test_shares_are_multiplied_by_the_weight_of_the_sentence(make: Make, vocabulary: Vocabulary, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("1\n0.5\n2\n3\n", encoding="utf-8")
    batch = first(batches(make, [{**tsv(tmp_path, PAIRS), "sentence_weights": f"{tmp_path}/weights"}], vocabulary, tmp_path))
    sums = shares(batch).sum(2).amax(1).tolist()
    assert dict(zip(batch.pairs, sums, strict=True)) == pytest.approx({0: 1.0, 1: 0.5, 2: 0.0, 3: 3.0})


def test_a_batch_without_links_has_none(make: Make, vocabulary: Vocabulary, tmp_path: Path) -> None:
    train = [tsv(tmp_path, [(source, target, "0-0" * (number == 9)) for number, (source, target, _) in enumerate(PAIRS * 3)])]
    corpus = make(corpus__train=train, **GUIDED).corpus
    stores = open_stores(corpus, vocabulary, tmp_path / "store")
    its = Batches(stores, corpus, BatchConfig(sentences=1), vocabulary, 1)
    found = [turn.batch for turn in islice(its.stream(DataShard(), Position()), 12)]
    assert [batch.pairs for batch in found if batch.links is not None] == [(9,)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("two words", {0: "▁two", 1: "▁words"}),
        ("  two \t words ", {0: "▁two", 1: "▁words"}),
        ("one\u00a0word more", {0: "▁one", 1: "▁word", 2: "▁more"}),
        ("a \u200b b", {0: "▁a", 2: "▁b"}),
        ("▁▁ x", {1: "▁x"}),
        ("six 字 two", {0: "▁six", 1: "▁<unk>", 2: "▁two"}),
        ("a¨b c", {0: "▁a▁<unk>b", 1: "▁c"}),
    ],
    ids=ascii,
)
def test_whole_words_are_what_whitespace_separates(vocabulary: Vocabulary, line: str, words: dict[int, str]) -> None:
    """Also where SentencePiece leaves out a word, as in the fourth line, or divides one, as in the last."""
    (ids,) = vocabulary.encode([line])
    found = WholeWords(vocabulary).of_line(line, np.array(ids), SOURCE).tolist()
    texts = dict.fromkeys(found, "")
    for piece, word in zip(ids, found, strict=True):
        texts[word] += vocabulary.piece(piece)
    assert texts == words
    assert WholeWords(vocabulary).of_line(line, np.array(ids[:2]), SOURCE).tolist() == found[:2], "the line was cut"


def test_pieces_of_another_text_are_in_no_word(vocabulary: Vocabulary) -> None:
    ids = np.array(vocabulary.encode(["six seven eight"])[0])
    assert set(WholeWords(vocabulary).of_line("six", ids, TARGET).tolist()) == {-1}


def test_links_of_words_that_sentencepiece_divides_or_leaves_out_go_to_their_pieces(
    make: Make, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    pairs = [("a¨b six", "sechs", "0-0"), ("a \u200b six", "\u200b sechs", "1-1 2-1"), ("a \u200b", "b", "1-0")]
    batch = first(batches(make, [tsv(tmp_path, pairs)], vocabulary, tmp_path))
    found = shares(batch)
    for row, pair in enumerate(batch.pairs):
        source, target, links = pairs[pair]
        wanted = expected(vocabulary, source, target, links, found.shape[2])
        torch.testing.assert_close(found[row, : len(wanted)], wanted)
    assert {pair: bool(found[row].any()) for row, pair in enumerate(batch.pairs)} == {0: True, 1: True, 2: False}


@pytest.mark.parametrize(
    ("links", "said"),
    [
        (["0-0", "0-0 x"], r"a.links, line 2: 'x' is not a link; write the numbers of a source word and of a target word"),
        (["0-0", "0-0-1"], "line 2: '0-0-1' is not a link"),
        (["0:0", ""], "line 1: '0:0' is not a link"),
        (["-1-0", ""], "line 1: '-1-0' is not a link"),
        (["12345678901-0", ""], "is not a link"),
        (["0-0", "1-1 2-0"], r"a.links, line 2: link 2-0 is outside of its pair, which has 2 source words and 3 target words"),
        (["0-0", "1-3"], "line 2: link 1-3 is outside"),
        (["0-0"], r"corpus.train: alignments: .*a.links has 1 line, and the corpus 2; give one per pair"),
        (["0-0", "", ""], r"a.links has 3 lines, and the corpus 2"),
        (["", ""], r"corpus.train: alignments: .*a.links has no links; give the word alignments"),
    ],
)
@pytest.mark.parametrize("where", ["store", "survey"])
def test_a_mistake_in_the_file_is_named(
    make: Make, vocabulary: Vocabulary, tmp_path: Path, links: list[str], said: str, where: str
) -> None:
    train = [tsv(tmp_path, [("six seven", "sechs und sieben", "")] * 2)]
    Path(train[0]["alignments"]).write_text("".join(line + "\n" for line in links), encoding="utf-8")
    if where == "store" or not any(links):
        with pytest.raises(UserError, match=said):
            batches(make, train, vocabulary, tmp_path)
        assert not list(tmp_path.glob("store/*")), "nothing half-made is left"
    else:  # before a vocabulary is trained
        with pytest.raises(UserError, match=said):
            _ = Survey(make(corpus__train=train, **GUIDED).corpus).lines


def test_other_links_are_another_corpus_and_the_same_ones_are_not(make: Make, vocabulary: Vocabulary, tmp_path: Path) -> None:
    found = []
    for links in ("0-0", "", "0-0"):
        train = [tsv(tmp_path, [(source, target, links) for source, target, _ in PAIRS])]
        if not links:
            del train[0]["alignments"]
        corpus = make(corpus__train=train, **(GUIDED if links else {})).corpus
        stores = open_stores(corpus, vocabulary, tmp_path / "store")
        found.append((stores.paths[0], stores.identity[0]["checksum"]))
    assert found[0] == found[2]
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"corpus__train": [{"files": ["a", "b"], "alignments": "c"}]},
         "corpus.train has alignments, but no attention head learns them; set model.guided_alignment.layer"),
        ({"model__guided_alignment": {"layer": 1}}, "model.guided_alignment.layer needs a corpus with alignments"),
        ({"corpus__train": [{"files": ["a", "b"], "alignments": "c"}], "model__guided_alignment": {"layer": 2}},
         "model.guided_alignment.layer 2 is not one of the 1 decoder layers"),
        ({"corpus__alignments": "c"}, r"unknown key corpus.alignments; give them to their corpus"),
        ({"model__guided_alignment": {"layer": 0}}, "model.guided_alignment.layer: it should be greater than or equal to 1"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_configuration_is_named(make: Make, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make(**changes)


def test_a_head_that_learns_no_more_needs_no_alignments(make: Make) -> None:
    assert make(model__guided_alignment={"layer": 1, "weight": 0}).model.guided_alignment.layer == 1


def test_the_choices_are_printed(make: Make) -> None:
    config = make(corpus__train=[{"files": ["a", "b"], "alignments": ["c.gz", "d"]}], **GUIDED)
    printed = by_origin(config, {})
    assert validate(yaml.safe_load(printed), {}).corpus.parts[0].alignments == ["c.gz", "d"]
    assert "  guided_alignment:\n    # decoder layer" in printed


def test_a_pipe_is_refused(make: Make, tmp_path: Path) -> None:
    entry = tsv(tmp_path, PAIRS)
    Path(entry["alignments"]).unlink()
    os.mkfifo(entry["alignments"])
    with pytest.raises(UserError, match=r"a.links: is a pipe, but a corpus is read several times"):
        start(make(corpus__train=[entry], **GUIDED), False, False)


@pytest.mark.parametrize("kind", [{"size": [90, 110]}, {"size": 60, "type": "char"}, {"size": 150, "type": "word"}], ids=str)
def test_every_kind_of_vocabulary_keeps_the_links(make: Make, demo: Path, tmp_path: Path, kind: dict[str, Any]) -> None:
    vocabulary = train(make(corpus__vocabulary=kind).corpus)
    batch = first(batches(make, [tsv(tmp_path, PAIRS)], vocabulary, tmp_path))
    found, words = shares(batch), WholeWords(vocabulary)
    for row, pair in enumerate(batch.pairs):
        sides = [np.array(vocabulary.encode([PAIRS[pair][side]], side)[0]) for side in (SOURCE, TARGET)]
        left, right = (words.of_line(PAIRS[pair][side], ids, side) for side, ids in enumerate(sides))
        linked = {f"{left[place]}-{right[other]}" for other, place in found[row].nonzero().tolist()}
        seen = {f"{word}-{other}" for word in left for other in right}  # neighbors that are unknown share a piece
        assert linked == set(PAIRS[pair][2].split()) & seen
        assert kind.get("type") == "word" or [len(set(its)) for its in (left, right)] == [
            len(line.split()) for line in PAIRS[pair][:2]
        ]
