"""sacreBLEU's metrics, and the choice of BLEU's tokenizer by the script of the references."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from nmt_train.common.errors import UserError

AUTO, DEFAULT = "auto", "13a"
# Those of sacreBLEU. (Their module is slow to import, and most commands do not need it.)
TOKENIZERS = dict.fromkeys(
    (AUTO, DEFAULT, "intl", "zh", "char", "ja-mecab", "ko-mecab", "flores101", "flores200", "spBLEU-1K", "spm", "none")
)
# Scripts that are written without spaces between words, with tokenizers that need no further package.
_WITHOUT_SPACES = {
    # Kana, Thai, Lao, Tibetan, Burmese, Khmer
    "char": re.compile("[\u3040-\u30ff\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff]"),
    "zh": re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"),  # Han, if there are no Kana
}
_SHARE = 0.1  # of the characters: fewer are names in a text of another script


def choose_tokenizer(wanted: str, references: Sequence[str]) -> str:
    """The tokenizer that BLEU is computed with. wanted: one of TOKENIZERS; AUTO: by the script of the references."""
    if wanted != AUTO:
        return wanted
    text = "".join("".join(line.split()) for line in references)
    for tokenizer, characters in _WITHOUT_SPACES.items():
        if len(characters.findall(text)) > _SHARE * len(text):
            return tokenizer
    return DEFAULT


def scorer(metric: str, tokenizer: str = DEFAULT, references: Sequence[str] | None = None) -> Any:
    """Return sacreBLEU's object for a metric of translations; tokenizer: that of BLEU.

    references: may be given here instead of with each score. Raises UserError if the tokenizer is not installed.
    """
    import sacrebleu  # slow to import, and most commands do not need it

    from nmt_train.model.exact_match import ExactMatch

    given = None if references is None else [references]
    split = tokenizer in _WITHOUT_SPACES  # TER counts words: without spaces, a sentence would be one
    others: dict[str, Callable[[], Any]] = {
        "chrf": lambda: sacrebleu.CHRF(references=given),
        "chrf++": lambda: sacrebleu.CHRF(word_order=2, references=given),
        "ter": lambda: sacrebleu.TER(normalized=split, asian_support=split, references=given),
        "exact-match": lambda: ExactMatch(given),
    }
    if metric in others:
        return others[metric]()
    try:
        return sacrebleu.BLEU(tokenize=tokenizer, force=True, references=given)  # force: no warning about tokenized text
    except (RuntimeError, ImportError, OSError) as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"BLEU: the tokenizer {tokenizer} cannot be used here: {why}; install it, or name another one"
        ) from None
