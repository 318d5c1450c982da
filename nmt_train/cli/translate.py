"""nmt-translate: read lines of source text from stdin and write their translations to stdout."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from typing import TextIO

from nmt_train import cli
from nmt_train.common.errors import UserError
from nmt_train.common.paths import expanded
from nmt_train.common.plural import counted
from nmt_train.common.streams import tell

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
        help="print the N best translations of each line: line number from 0 ||| text ||| log p ||| score",
    )
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
    cli.add_model_options(options)
    return options


def command(arguments: Sequence[str]) -> int:
    given = parser().parse_args(arguments)
    from tqdm import tqdm

    from nmt_train import device
    from nmt_train.corpus.text import Lines, NotUtf8
    from nmt_train.load_model import load_ensemble
    from nmt_train.model.beam_search import SearchConfig
    from nmt_train.model.translator import Translator
    from nmt_train.run.folder import newest

    if given.n_best is not None and given.n_best > given.beam:
        raise UserError(f"command line: --n-best {given.n_best} needs a --beam of at least as many, not {given.beam}")
    own = device.prepare_one(given.devices, given.threads)
    model, vocabulary, tags = load_ensemble([newest(path, given.average) for path in given.model], own)
    search = SearchConfig(beam=given.beam, normalization=given.normalization, n_best=given.n_best or 1)
    translator = Translator(model, vocabulary, search, given.batch_tokens, tags=tags)
    if sys.stdin is None:
        raise UserError("standard input is closed; give the lines to translate, as in nmt-translate --model RUN < FILE")
    if sys.stdout is None:
        raise UserError(
            "standard output is closed; say where the translations should go, as in nmt-translate --model RUN > FILE"
        )
    lines = Lines(sys.stdin.buffer, "standard input", given.on_error)
    translations = translator.stream(lines, given.window, None if _is_file(sys.stdin) else _PAUSE)
    results = tqdm(translations, unit=" lines", leave=False, disable=sys.stdout.isatty() or None)
    for number, found in enumerate(results):
        if given.n_best is None:
            output = found[0][0] + "\n"
        else:
            padded = [*found, *found[-1:] * given.n_best][: given.n_best]  # N lines, also for an empty source
            output = "".join(
                f"{number} ||| {text} ||| {hypothesis.log_probability:.4f} ||| {hypothesis.score:.4f}\n"
                for text, hypothesis in padded
            )
        sys.stdout.buffer.write(output.encode("utf-8"))
        sys.stdout.buffer.flush()  # whoever sends a line may wait for its translation
    for numbers, what in (
        (translator.cut, "longer than 1,000 pieces: cut"),
        (translator.broken_off, "translated into something that did not end: broken off"),
        (translator.unknown_codes, "with a language code that the model does not know: read as text"),
        (translator.untagged, f"without a tag, which all training sources had: begin each with {' or '.join(tags)}"),
        (lines.invalid, _INVALID.get(given.on_error, "")),
    ):
        if numbers:
            some = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
            are = "is" if len(numbers) == 1 else "are"
            tell(f"warning: {counted(len(numbers), 'line')} {are} {what} (line {some})")
    if lines.error is not None:
        done = (
            f"translated before it: {counted(lines.number, 'line')}; correct it and continue with tail -n +{lines.number + 1}"
        )
        choice = ", or use --on-error replace or skip" if isinstance(lines.error, NotUtf8) else ""
        raise UserError(f"{lines.error}; {done}{choice}")
    return 0


def _is_file(stream: TextIO) -> bool:
    """Whether the whole input is there already, so that waiting for it is not waiting for a person or a program."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except OSError:
        return True


def main() -> None:
    sys.exit(cli.run(command))
