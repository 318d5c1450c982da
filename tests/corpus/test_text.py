from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import re
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nmt_train.common.errors import UserError
from nmt_train.corpus import formats
from nmt_train.corpus.text import Lines, NotUtf8, clean, decode_lines, read_lines, read_pairs


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
    with pytest.raises(UserError, match="standard input, line 1"):
        list(decode_lines(io.BytesIO(b"\xff\n"), "standard input"))


def packed(end: str, data: bytes) -> bytes:
    """The data in the format of files whose names end so."""
    if end == ".zst":
        return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd").compress(data)
    return {".gz": gzip, ".xz": lzma}[end].compress(data)  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", [".gz", ".xz", ".zst"])
def test_compressed_files_are_read_and_damaged_ones_named(tmp_path: Path, end: str) -> None:
    data = packed(end, "schön\nzwei\n".encode() * 1000)
    assert list(read_lines(file(tmp_path, f"a{end}", data))) == ["schön", "zwei"] * 1000
    assert list(read_lines(file(tmp_path, f"twice{end}", data + data))) == ["schön", "zwei"] * 2000
    assert list(read_pairs([file(tmp_path, f"p.tsv{end}", packed(end, b"one\teins\n"))], "corpus.train")) == [("one", "eins")]
    middle = len(data) // 2
    for name, damaged in (
        ("cut", data[:-9]),
        ("no", b"plain text"),
        ("changed", data[:middle] + b"\x00\xff" + data[middle + 2 :]),
    ):
        with pytest.raises(UserError, match=name + end):
            list(read_lines(file(tmp_path, f"{name}{end}", damaged)))


def test_without_the_package_for_zst_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    path = file(tmp_path, "a.zst", b"\x28\xb5\x2f\xfd")
    with pytest.raises(UserError, match=r"a\.zst: reading \.zst needs a package: pip install backports\.zstd"):
        list(read_lines(path))


@settings(max_examples=200)
@given(
    lines=st.lists(st.text(st.sampled_from("ab\u00e9\u0085\u2028\x00\x0b\x1f\t\r\ufffd中"), max_size=5), max_size=20),
    invalid=st.integers(0, 30), size=st.integers(1, 12),
)  # fmt: skip
def test_lines_are_the_same_one_by_one_and_in_blocks(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], invalid: int, size: int
) -> None:
    raw = [line.encode() for line in lines]
    bad = invalid < len(raw)
    if bad:
        raw[invalid] += b"\xff"
    data = b"\n".join(raw)
    expected = [clean(line.removesuffix(b"\r").decode("utf-8", "replace")) for line in raw]
    if expected and not raw[-1]:
        expected.pop()  # what follows the last line feed is no line
    wide = any(line.removesuffix(b"\r").count(0) > max(1, 0.4 * len(line)) for line in raw)
    assume(not wide and (invalid or b"\0" not in data))  # else it may be taken for UTF-16
    told: list[int] = []

    def tell(number: int, line: bytes) -> str:
        told.append(number)
        return line.decode("utf-8", "replace")

    assert list(decode_lines(io.BytesIO(data), "here", tell)) == expected
    assert told == [invalid + 1] * bad
    path = tmp_path_factory.getbasetemp() / "blocks"
    path.write_bytes(data)
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "BLOCK", size)
        if not bad:
            assert list(read_lines(path)) == expected
            return
        with pytest.raises(NotUtf8, match=f"line {invalid + 1}:"):
            for line in read_lines(path):
                found.append(line)
    assert found == expected[:invalid]


@pytest.mark.slow
def test_a_compressed_file_that_grows_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_SMALL", 10_000)
    bomb = file(tmp_path, "bomb.gz", gzip.compress(b"\n" * 100_000))
    with pytest.raises(UserError, match=r"bomb\.gz: its text is more than 200 times as long as the file.*corpus\.max_ratio"):
        list(read_lines(bomb))
    assert len(list(read_lines(bomb, ratio=2000))) == 100_000
    assert len(list(read_pairs([bomb, bomb], "corpus.train", ratio=2000))) == 100_000
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


TEXT = "Straße 北京\nzwei\n"
OTHER_FORMATS: dict[str, tuple[bytes, str]] = {
    "gzip": (gzip.compress(TEXT.encode()), r"is compressed with gzip; give it a name that ends in \.gz, or decompress it"),
    "xz": (
        lzma.compress(TEXT.encode()),
        r"is compressed with xz; give it a name that ends in \.xz, or decompress it \(xz -d\)",
    ),
    "bzip2": (bz2.compress(TEXT.encode()), "is compressed with bzip2; decompress it"),
    "zstd": (
        bytes.fromhex("28b52ffd0405290000") + b"eins\n",
        r"is compressed with zstd; give it a name that ends in \.zst, or decompress it",
    ),
    "zip": (b"PK\x03\x04\x14\x00", "is a .zip archive; unpack it"),
    "UTF-16": (TEXT.encode("utf-16"), r"is UTF-16; convert it to UTF-8 \(iconv -f UTF-16 -t UTF-8\)"),
    "UTF-16, the other order": (b"\xfe\xff" + TEXT.encode("utf-16-be"), "is UTF-16; convert"),
    "UTF-32": (TEXT.encode("utf-32"), "is UTF-32; convert"),
    "UTF-16LE without a mark": (TEXT.encode("utf-16-le"), "is UTF-16; convert it to UTF-8 .*UTF-16LE"),
    "UTF-16BE without a mark": (TEXT.encode("utf-16-be"), "is UTF-16; convert it to UTF-8 .*UTF-16BE"),
    "UTF-16LE without a mark or a line feed": ("böse".encode("utf-16-le"), "is UTF-16; convert .*UTF-16LE"),
    "UTF-16LE of Windows without a mark": ("北京\r\n中\r\n".encode("utf-16-le"), "is UTF-16; convert .*UTF-16LE"),
    "UTF-16BE of Windows without a mark": ("北京\r\n中\r\n".encode("utf-16-be"), "is UTF-16; convert .*UTF-16BE"),
    "Chinese UTF-16LE without a mark": ("北京市\n中文\n".encode("utf-16-le"), "is UTF-16; convert .*UTF-16LE"),
    "Chinese UTF-16BE without a mark": ("北京市\n中文\n".encode("utf-16-be"), "is UTF-16; convert .*UTF-16BE"),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_files_in_other_formats_are_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    data, said = OTHER_FORMATS[name]
    with pytest.raises(UserError, match=rf"train.txt: {said}"):
        list(read_lines(file(tmp_path, "train.txt", data)))


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_so_are_those_on_standard_input_whatever_is_to_be_done_with_invalid_lines(name: str) -> None:
    data, said = OTHER_FORMATS[name]
    for on_error in ("stop", "skip", "replace"):
        lines = Lines(io.BytesIO(data), "standard input", on_error)
        assert list(lines) == []
        assert re.search(f"standard input: {said}", str(lines.error))


def test_a_name_with_gz_does_not_make_another_format_gzip(tmp_path: Path) -> None:
    for data, said in (
        (b"text\n", "not compressed with gzip; rename it"),
        (lzma.compress(b"text\n"), r"compressed with xz; give it a name that ends in \.xz, or decompress it"),
    ):
        with pytest.raises(UserError, match=rf"a.gz: its name ends in .gz, but it is {said}"):
            list(read_lines(file(tmp_path, "a.gz", data)))
    with pytest.raises(UserError, match="a.gz: is compressed with gzip twice; decompress it once"):
        list(read_lines(file(tmp_path, "a.gz", gzip.compress(gzip.compress(b"text\n")))))


@pytest.mark.parametrize("text", ["BZh is no word\n", "PKW\n", "(µ/ý\n", "ÿþ\n"])
def test_text_that_begins_like_another_format_is_text(tmp_path: Path, text: str) -> None:
    assert list(read_lines(file(tmp_path, "a", text.encode()))) == [text.rstrip("\n")]


def test_text_in_another_encoding_is_not_taken_for_utf_16(tmp_path: Path) -> None:
    with pytest.raises(NotUtf8, match="line 1: not UTF-8"):
        list(read_lines(file(tmp_path, "a", "böse Größe\nzwei\n".encode("latin-1"))))
