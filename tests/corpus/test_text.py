from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest

from nmt_train.common.errors import UserError
from nmt_train.corpus import text
from nmt_train.corpus.text import decode_lines, read_lines, read_pairs


def file(folder: Path, name: str, data: bytes) -> str:
    (folder / name).write_bytes(data)
    return str(folder / name)


def test_lines_end_at_the_line_feed_alone(tmp_path: Path) -> None:
    lines_of = "one\x0btwo\x0cthree\u2028four\u2029five\x85six\x1cseven\rstill\nnext\n"
    lines = list(read_lines(file(tmp_path, "a", lines_of.encode())))
    assert lines == ["one two three four five six seven still", "next"]


def test_a_byte_order_mark_and_carriage_returns_before_line_feeds_vanish(tmp_path: Path) -> None:
    assert list(read_lines(file(tmp_path, "a", b"\xef\xbb\xbfone\r\ntwo\r\n"))) == ["one", "two"]


def test_nul_and_other_control_characters_become_spaces_and_tabs_stay(tmp_path: Path) -> None:
    assert list(read_lines(file(tmp_path, "a", b"a\x00b\x07c\td\x7f\n"))) == ["a b c\td "]


def test_a_last_line_without_line_feed_counts_and_an_empty_file_has_none(tmp_path: Path) -> None:
    assert list(read_lines(file(tmp_path, "a", b"one\ntwo"))) == ["one", "two"]
    assert list(read_lines(file(tmp_path, "b", b""))) == []


def test_bad_utf8_is_named_with_file_and_line(tmp_path: Path) -> None:
    path = file(tmp_path, "latin1.txt", b"gut\nsch\xf6n\n")
    with pytest.raises(UserError, match=r"latin1\.txt, line 2: not UTF-8"):
        list(read_lines(path))
    with pytest.raises(UserError, match=r"wide\.txt, line 1: not UTF-8 \(byte 2 of the line\); convert the file"):
        list(read_lines(file(tmp_path, "wide.txt", "gut\nböse\n".encode("utf-16-le"))))
    with pytest.raises(UserError, match="standard input, line 1"):
        list(decode_lines(io.BytesIO(b"\xff\n"), "standard input"))


def test_compressed_files_are_read_and_damaged_ones_named(tmp_path: Path) -> None:
    data = gzip.compress("schön\nzwei\n".encode())
    assert list(read_lines(file(tmp_path, "a.gz", data))) == ["schön", "zwei"]
    for name, damaged in (("cut.gz", data[:-9]), ("no.gz", b"plain text")):
        with pytest.raises(UserError, match=name):
            list(read_lines(file(tmp_path, name, damaged)))


def test_a_compressed_file_that_grows_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_SMALL", 10_000)
    bomb = file(tmp_path, "bomb.gz", gzip.compress(b"\n" * 1_000_000))
    with pytest.raises(UserError, match=r"bomb\.gz: its text is more than 200 times as long as the file.*corpus\.max_ratio"):
        list(read_lines(bomb))
    assert len(list(read_lines(bomb, ratio=2000))) == 1_000_000
    assert len(list(read_pairs([bomb, bomb], "corpus.train", ratio=2000))) == 1_000_000
    assert len(list(read_lines(file(tmp_path, "small.gz", gzip.compress(b"\n" * 10_000))))) == 10_000
    assert len(list(read_lines(file(tmp_path, "plain", b"\n" * 20_000)))) == 20_000


def test_a_missing_file_a_folder_and_a_forbidden_one_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UserError, match=str(path)):
            list(read_lines(path))


def test_several_files_per_side_are_read_one_after_another(tmp_path: Path) -> None:
    source = [file(tmp_path, "a", b"1\n2\n"), file(tmp_path, "b", b"3\n")]
    target = [file(tmp_path, "c", b"eins\n"), file(tmp_path, "d", b"zwei\ndrei\n")]
    assert list(read_pairs([source, target], "corpus.train")) == [("1", "eins"), ("2", "zwei"), ("3", "drei")]


@pytest.mark.parametrize(("left", "right"), [(3, 5), (5, 3), (0, 2), (2, 0)])
def test_sides_of_different_length_are_refused_with_both_counts(tmp_path: Path, left: int, right: int) -> None:
    files = [file(tmp_path, "a", b"x\n" * left), file(tmp_path, "b", b"y\n" * right)]
    with pytest.raises(UserError, match=rf"a has {left} lines and .*b has {right}"):
        list(read_pairs(files, "corpus.train"))


def test_tsv_needs_a_tab_in_every_line(tmp_path: Path) -> None:
    path = file(tmp_path, "p.tsv", b"one\teins\nthree\tdrei\tmore\n")
    assert list(read_pairs([path], "corpus.train")) == [("one", "eins"), ("three", "drei")]
    with pytest.raises(UserError, match=r"q\.tsv, line 2: no tab"):
        list(read_pairs(file(tmp_path, "q.tsv", b"a\tb\nc\n"), "corpus.train"))


def test_two_tsv_files_are_not_taken_for_source_and_target(tmp_path: Path) -> None:
    one, other = file(tmp_path, "a.tsv", b"one\teins\n"), file(tmp_path, "b.tsv", b"two\tzwei\n")
    with pytest.raises(UserError, match=r"corpus\.train: has two entries, .* \[\[a\.tsv, b\.tsv\]\]"):
        list(read_pairs([one, other], "corpus.train"))
    assert list(read_pairs([[one, other]], "corpus.train")) == [("one", "eins"), ("two", "zwei")]


def test_neither_one_nor_two_entries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"corpus\.train: give \[source, target\]"):
        list(read_pairs(["a", "b", "c"], "corpus.train"))
