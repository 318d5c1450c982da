"""nmt-translate: read lines of source text from stdin and write their translations to stdout."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from nmt_train import cli
from nmt_train.common.errors import UserError
from nmt_train.common.paths import expanded
from nmt_train.common.plural import counted
from nmt_train.common.streams import tell

if TYPE_CHECKING:
    from nmt_train.model.beam_search import Hypothesis

_PAUSE = 0.05  # seconds without a further line, after which what a pipe or a terminal has sent is translated
_INVALID = {
    "replace": "not UTF-8: invalid bytes are replaced",
    "skip": "not UTF-8: the translation is empty",
}


def parser() -> cli.Parser:
    options = cli.Parser(prog="nmt-translate", description="Translate lines of text from stdin to stdout, in order.")
    options.add_argument(
        "--model", required=True, nargs="+", type=expanded, metavar="PATH",
        help="run folder (its last checkpoint) or checkpoint; several form an ensemble, which averages their probabilities",
    )  # fmt: skip
    options.add_argument("--average", type=cli.positive, default=1, metavar="N", help="average each run's last N checkpoints")
    options.add_argument(
        "--n-best",
        type=cli.positive,
        default=None,
        metavar="N",
        help="print the N best different translations of each line, or all if there are fewer: line number from 0 ||| text"
        " (||| alignment) ||| log p ||| score",
    )
    options.add_argument(
        "--alignment", choices=("hard", "soft"), default=None,
        help="print the word alignment after each translation and |||; hard: pairs of numbers, from 0, of a word of the source"
        " and a word of the translation, as 0-0 1-2; soft: for each word of the translation, how much it attends to each word"
        " of the source; both ends count as the last words. Words are separated by spaces",
    )  # fmt: skip
    options.add_argument(
        "--pieces", action="store_true",
        help="print the pieces of the vocabulary, separated by spaces, instead of text. --alignment then aligns pieces; those"
        " of the source are what SentencePiece makes of the line with the file vocabulary.model of the run",
    )  # fmt: skip
    options.add_argument(
        "--window",
        type=cli.positive,
        default=2000,
        metavar="N",
        help="lines to read ahead, if they come without a pause (default: 2000)",
    )
    options.add_argument(
        "--on-error", choices=("stop", *_INVALID), default="stop",
        help="what to do with a line that is not UTF-8: stop: translate the lines before it and exit with an error; replace:"
        " replace its invalid bytes by U+FFFD and translate it; skip: print an empty line (default: stop)",
    )  # fmt: skip
    _add_demands(options)
    cli.add_model_options(options)
    return options


def _add_demands(options: cli.Parser) -> None:
    options.add_argument(
        "--prefix", type=expanded, metavar="FILE",
        help="a file with the beginning of each line's translation, or an empty line. Its last word may be continued,"
        " unless the prefix ends with a space",
    )  # fmt: skip
    options.add_argument(
        "--terms", type=expanded, metavar="FILE",
        help="a file with a line for each line: the terms, separated by tabs, that its translation must contain as whole words",
    )  # fmt: skip
    options.add_argument(
        "--unknown", choices=("avoid", "copy"), default="avoid",
        help="how to translate characters that the vocabulary lacks: avoid: by known pieces; copy: where the model predicts its"
        " unknown piece, copy those of the source, in their order (default: avoid)",
    )  # fmt: skip
    options.add_argument(
        "--sample", type=_sampling, metavar="HOW",
        help="draw each piece at random instead of searching: top-k=K: from the K most probable; nucleus=P: from the most"
        " probable that together have probability P. With --n-best N, the different ones of N samples, which are more diverse"
        " than the N best of a beam",
    )  # fmt: skip
    options.add_argument("--seed", type=cli.count, default=1, metavar="N", help="of --sample (default: 1)")
    options.add_argument(
        "--max-length-factor", type=cli.bounded(float, 0, 100), default=2.0, metavar="N",
        help="a translation has at most N times as many pieces as its source, plus 10 (default: 2)",
    )  # fmt: skip


def _sampling(text: str) -> dict[str, float]:
    """`top-k=10` as {"top_k": 10}, or `nucleus=0.9` as {"nucleus": 0.9}."""
    kind, _, value = text.partition("=")
    try:
        if kind == "top-k":
            return {"top_k": int(cli.positive(value))}
        if kind == "nucleus":
            return {"nucleus": cli.bounded(float, 1e-6, 1)(value)}
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}; write top-k=10 or nucleus=0.9") from None
    raise argparse.ArgumentTypeError(f"{text} is unknown; write top-k=10 or nucleus=0.9")


def _check(given: argparse.Namespace, arguments: Sequence[str]) -> None:
    if given.sample is None:
        if given.n_best is not None and given.n_best > given.beam:
            raise UserError(f"command line: --n-best {given.n_best} needs a --beam of at least as many, not {given.beam}")
    elif given.beam > 1 and any(word.partition("=")[0] == "--beam" for word in arguments):
        raise UserError("command line: --sample draws translations and has no beam; leave out --beam (or --sample)")
    elif given.terms is not None:
        raise UserError("command line: --terms needs beam search; leave out --sample (or --terms)")
    if sys.stdin is None:
        raise UserError("standard input is closed; give the lines to translate, as in nmt-translate --model RUN < FILE")
    if sys.stdout is None:
        raise UserError(
            "standard output is closed; say where the translations should go, as in nmt-translate --model RUN > FILE"
        )


def command(arguments: Sequence[str]) -> int:
    given = parser().parse_args(arguments)
    from tqdm import tqdm

    from nmt_train import device
    from nmt_train.corpus.text import Lines, NotUtf8
    from nmt_train.load_model import load_ensemble
    from nmt_train.model.beam_search import SearchConfig
    from nmt_train.model.request import Requests
    from nmt_train.model.sampling import Sampling
    from nmt_train.model.translator import Translator
    from nmt_train.model.word_alignment import as_text
    from nmt_train.run.folder import newest

    _check(given, arguments)
    own = device.prepare_one(given.devices, given.threads)
    model, vocabulary, tags = load_ensemble([newest(path, given.average) for path in given.model], own)
    if given.alignment and not model.guided:
        raise UserError(
            "command line: --alignment needs a model, or models, with a guided attention head; train one with"
            " model.guided_alignment.layer (docs/corpora.md), or remove --alignment"
        )
    search = SearchConfig(
        beam=given.beam, normalization=given.normalization, length_factor=given.max_length_factor, n_best=given.n_best or 1
    )
    translator = Translator(
        model, vocabulary, search, given.batch_tokens, tags=tags, copy_unknown=given.unknown == "copy",
        sampling=None if given.sample is None else Sampling(**given.sample, seed=given.seed), align=bool(given.alignment),
        pieces=given.pieces,
    )  # fmt: skip
    lines = Lines(sys.stdin.buffer, "standard input", given.on_error)
    requests = Requests(lines, vocabulary, given.prefix, given.terms)
    translations = translator.stream(requests, given.window, None if _is_file(sys.stdin) else _PAUSE)
    results = tqdm(translations, unit=" lines", leave=False, disable=sys.stdout.isatty() or None)
    for number, found in enumerate(results):
        if given.alignment:
            found = [(f"{text} ||| {as_text(its.alignment, given.alignment)}", its) for text, its in found]
        sys.stdout.buffer.write("".join(_rows(number, found, given.n_best)).encode("utf-8"))
        sys.stdout.buffer.flush()  # whoever sends a line may wait for its translation
    _warn(
        (translator.cut, "longer than 1,000 pieces: cut"),
        (translator.broken_off, "translated into something that did not end: broken off"),
        (translator.lacking, "translated without a term"),
        (translator.unknown_codes, "with a language code that the model does not know: read as text"),
        (translator.untagged, f"without a tag, which all training sources had: begin each with {' or '.join(tags)}"),
        (lines.invalid, _INVALID.get(given.on_error, "")),
    )
    if requests.error is not None:
        raise requests.error
    if lines.error is not None:
        done = (
            f"translated before it: {counted(lines.number, 'line')}; correct it and continue with tail -n +{lines.number + 1}"
        )
        choice = ", or use --on-error replace or skip" if isinstance(lines.error, NotUtf8) else ""
        raise UserError(f"{lines.error}; {done}{choice}")
    return 0


def _rows(number: int, found: list[tuple[str, Hypothesis]], n_best: int | None) -> Iterator[str]:
    """The output for line `number`."""
    if n_best is None:
        yield found[0][0] + "\n"
        return
    for text, hypothesis in found:
        yield f"{number} ||| {text} ||| {hypothesis.log_probability:.4f} ||| {hypothesis.score:.4f}\n"


def _warn(*warnings: tuple[list[int], str]) -> None:
    for numbers, what in warnings:
        if numbers:
            some = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
            are = "is" if len(numbers) == 1 else "are"
            tell(f"warning: {counted(len(numbers), 'line')} {are} {what} (line {some})")


def _is_file(stream: TextIO) -> bool:
    """Whether the whole input is there already, so that waiting for it is not waiting for a person or a program."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except OSError:
        return True


def main() -> None:
    sys.exit(cli.run(command))
