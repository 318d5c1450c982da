"""Terms of a list in texts. A line of the list has a source term, a tab, and its translation; a term may have several lines.

    python terms.py annotate LIST SOURCE TARGET OUT     training pairs with annotated terms, into OUT.source and OUT.target
    python terms.py annotate LIST < SOURCE              lines to translate, with annotated terms
    python terms.py accuracy LIST SOURCE REFERENCE TRANSLATIONS

An annotated term is followed by the translation that it should have: <t> apples <a> Äpfel </t> (Dinu et al. 2019, "Training
Neural Machine Translation to Apply Terminology Constraints"). In training pairs, that is one that the target has; in lines to
translate, the first of the list. The accuracy is the share of terms with a translation in the reference that have it in the
translation, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

Terms = dict[str, list[str]]


def read(path: str) -> Terms:
    found: Terms = {}
    for number, line in enumerate(lines(path), 1):
        source, _, target = (part.strip() for part in line.partition("\t"))
        if not (source and target):
            sys.exit(f"{path}, line {number}: write a source term, a tab and its translation")
        found.setdefault(source.lower(), []).append(target)
    return found


def lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def paired(*paths: str) -> list[tuple[str, ...]]:
    """The lines of several files with the same number of lines."""
    texts = [lines(path) for path in paths]
    if len(set(map(len, texts))) > 1:
        sys.exit(
            f"{', '.join(paths)}: have {', '.join(str(len(text)) for text in texts)} lines; they must have the same number"
        )
    return list(zip(*texts, strict=True))


def contains(text: str, term: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(term)}(?!\w)", text) is not None


class Finder:
    """Finds the terms of a list in a source; where several begin, the longest."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        longest_first = "|".join(map(re.escape, sorted(terms, key=len, reverse=True)))
        self._pattern = re.compile(rf"(?<!\w)(?:{longest_first})(?!\w)", re.IGNORECASE)

    def wanted(self, source: str, target: str | None = None) -> Iterator[tuple[re.Match[str], str]]:
        """The occurrences of terms, each with its translation: one that `target` has, if there is a target."""
        for match in self._pattern.finditer(source):
            choices = self._terms[match[0].lower()]
            for choice in choices if target is None else (choice for choice in choices if contains(target, choice)):
                yield match, choice
                break

    def annotated(self, source: str, target: str | None = None) -> str:
        """The source with annotated terms; unchanged if it has none."""
        for match, translation in reversed(list(self.wanted(source, target))):
            source = f"{source[: match.start()]}<t> {match[0]} <a> {translation} </t>{source[match.end() :]}"
        return source


def annotate_pairs(finder: Finder, source: str, target: str, out: str) -> None:
    pairs = [pair for pair in paired(source, target) if any(finder.wanted(*pair))]
    annotated = [(finder.annotated(left, right), right) for left, right in pairs]
    for side, name in enumerate(("source", "target")):
        Path(f"{out}.{name}").write_text("".join(pair[side] + "\n" for pair in annotated), encoding="utf-8")
    print(f"{len(annotated):,} pairs have terms", file=sys.stderr)


def accuracy(finder: Finder, source: str, reference: str, translations: str) -> None:
    hits = [
        contains(text, term)
        for line, correct, text in paired(source, reference, translations)
        for _, term in finder.wanted(line, correct)
    ]
    print(f"{sum(hits):,} of {len(hits):,} terms: {sum(hits) / max(1, len(hits)):.1%}")


def main() -> None:
    match sys.argv[1:]:
        case ["annotate", terms, source, target, out]:
            annotate_pairs(Finder(read(terms)), source, target, out)
        case ["annotate", terms]:
            finder = Finder(read(terms))
            for line in sys.stdin:
                print(finder.annotated(line.rstrip("\n")), flush=True)
        case ["accuracy", terms, *files] if len(files) == 3:
            accuracy(Finder(read(terms)), *files)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
