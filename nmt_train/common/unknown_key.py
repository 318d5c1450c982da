"""What to say about a key that the configuration does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Names that other programs use, with what to use instead.
_ELSEWHERE = {
    **dict.fromkeys(("lr", "optimizer.lr", "learning_rate"), "did you mean optimizer.learning_rate?"),
    **dict.fromkeys(("batch_size", "batch.size"), "did you mean batch.tokens, or batch.sentences?"),
    **dict.fromkeys(("epochs", "max_epochs", "stop.epochs"), "write stop.after: 10e"),
    **dict.fromkeys(("updates", "max_updates", "stop.updates"), "write stop.after: 5000u"),
    **dict.fromkeys(("mini-batch", "mini_batch"), "did you mean batch.sentences, or batch.tokens?"),
    **dict.fromkeys(("early-stopping", "early_stopping"), "did you mean stop.patience?"),
    **dict.fromkeys(("valid-freq", "valid_freq", "save-freq"), "did you mean validation.every, or checkpoint.every?"),
    **dict.fromkeys(("type", "train-sets"), "docs/guide.md has our keys for those of Marian and other toolkits"),
    "log.tensorboard": "write log.trackers: [tensorboard], or nothing in place of false",
    **dict.fromkeys(
        ("corpus.weights", "corpus.weight"),
        "give every corpus its weight: corpus.train: [{files: [a, b], weight: 2}, ...] (docs/corpora.md)",
    ),
    "corpus.alignments": "give them to their corpus: corpus.train: [{files: [a, b], alignments: c}] (docs/corpora.md)",
    **dict.fromkeys(
        ("corpus.test", "test"), "training needs only corpus.valid; test a trained model with nmt-validate RUN --test FILE FILE"
    ),
}


def unknown(name: str, keys: Iterable[str], options: Iterable[str] = ()) -> str:
    """Return the error message for an unknown key; `options` are names that are valid in addition to the dotted `keys`."""
    keys = list(keys)
    known = dict.fromkeys([*keys, *options])
    sections = {key.rsplit(".", 1)[0] for key in keys if "." in key}
    if name in sections:
        return f"{name} is a section; give its keys, as in {next(k for k in keys if k.startswith(name + '.'))}"
    if name in _ELSEWHERE:
        return f"unknown key {name}; {_ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not near:
        last = name.rsplit(".", 1)[-1]
        near = [key for key in known if key.rsplit(".", 1)[-1] == last][:1]
    return f"unknown key {name}" + (f"; did you mean {near[0]}?" if near else "; see nmt-train --help")
