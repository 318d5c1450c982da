"""Sentences like those of the demo corpus, aligned by hand, and a simple word aligner for the demo corpus."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

# English, German, sure links, and possible ones: function words and punctuation without a counterpart of their own.
SENTENCES = [
    ("The train leaves at six o'clock.", "Der Zug fährt um sechs Uhr ab.", "0-0 1-1 2-2 2-6 3-3 4-4 5-5", "5-6"),
    ("I live in house number twelve.", "Ich wohne in Haus Nummer zwölf.", "0-0 1-1 2-2 3-3 4-4 5-5", ""),
    ("The number is seven hundred and three.", "Die Zahl ist siebenhundertdrei.", "0-0 1-1 2-2 3-3 4-3 6-3", "5-3"),
    ("It is half past nine.", "Es ist halb zehn.", "0-0 1-1 2-2 4-3", "3-2"),
    ("She gets up on Monday at seven o'clock.", "Sie steht am Montag um sieben Uhr auf.",
     "0-0 1-1 2-7 3-2 4-3 5-4 6-5 7-6", "1-7 2-1 7-7"),
    ("We buy eight bottles of milk on Friday.", "Wir kaufen am Freitag acht Flaschen Milch.",
     "0-0 1-1 2-4 3-5 5-6 6-2 7-3", "4-5 4-6"),
    ("The coat costs eighty-nine euros.", "Der Mantel kostet neunundachtzig Euro.", "0-0 1-1 2-2 3-3 4-4", ""),
    ("The book costs two hundred and ten euros and five cents.", "Das Buch kostet zweihundertzehn Euro und fünf Cent.",
     "0-0 1-1 2-2 3-3 4-3 6-3 7-4 8-5 9-6 10-7", "5-3"),
    ("That makes 45.20 euros.", "Das macht 45,20 Euro.", "0-0 1-1 2-2 3-3", ""),
    ("Today is the third of March 2011.", "Heute ist der dritte März 2011.", "0-0 1-1 2-2 3-3 5-4 6-5", "4-3 4-4"),
    ("The meeting is on Monday, the fifth of May 2003.", "Die Sitzung ist am Montag, dem fünften Mai 2003.",
     "0-0 1-1 2-2 3-3 4-4 5-5 6-6 8-7 9-8", "7-6 7-7"),
    ("The film starts at a quarter to nine.", "Der Film fängt um Viertel vor neun an.",
     "0-0 1-1 2-2 2-7 3-3 5-4 6-5 7-6", "4-4 7-7"),
    ("She wants thirty boxes of apples.", "Sie möchte dreißig Kisten Äpfel.", "0-0 1-1 2-2 3-3 5-4", "4-3 4-4"),
    ("Room forty-one is free.", "Zimmer einundvierzig ist frei.", "0-0 1-1 2-2 3-3", ""),
]  # fmt: skip
Sides = Sequence[tuple[list[str], list[str]]]


def align(lines: Sequence[tuple[str, str]]) -> list[set[tuple[int, int]]]:
    """The links on which IBM Model 1 (Brown et al. 1993) agrees in both directions."""
    pairs = [(source.split(), target.split()) for source, target in lines]
    forward, backward = _model_1(pairs), _model_1([(target, source) for source, target in pairs])
    return [
        {(source, target) for target, source in one} & {(source, target) for source, target in other}
        for one, other in zip(forward, backward, strict=True)
    ]


def _model_1(pairs: Sides, iterations: int = 8) -> list[set[tuple[int, int]]]:
    """For each pair, the number of each target word with that of the source word that explains it best."""
    chances: dict[tuple[str, str], float] = defaultdict(lambda: 1.0)
    for _ in range(iterations):
        counts, totals = defaultdict[tuple[str, str], float](float), defaultdict[str, float](float)
        for source, target in pairs:
            for word in target:
                sum_of_all = sum(chances[other, word] for other in source)
                for other in source:
                    share = chances[other, word] / sum_of_all
                    counts[other, word] += share
                    totals[other] += share
        chances = defaultdict(float, {pair: count / totals[pair[0]] for pair, count in counts.items()})
    return [
        {(at, max(range(len(source)), key=lambda of, word=word: chances[source[of], word])) for at, word in enumerate(target)}  # type: ignore[misc]
        for source, target in pairs
    ]
