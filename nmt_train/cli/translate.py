"""nmt-translate: read lines of source text from stdin and write their translations to stdout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nmt_train import cli


def parser() -> cli.Parser:
    options = cli.Parser(
        prog="nmt-translate", allow_abbrev=False, description="Translate lines of text from stdin to stdout, in order."
    )
    options.add_argument(
        "--model", required=True, type=Path, metavar="PATH", help="run folder (its last checkpoint) or checkpoint"
    )
    options.add_argument("--average", type=cli.positive, default=1, metavar="N", help="average the run's last N checkpoints")
    options.add_argument(
        "--n-best", type=cli.positive, default=None, metavar="N", help="print the N best: number ||| text ||| log p ||| score"
    )
    options.add_argument(
        "--window", type=cli.positive, default=None, metavar="N", help="lines to read ahead (default: 2000; 1 on a terminal)"
    )
    cli.add_model_options(options)
    return options


def command(arguments: Sequence[str]) -> int:
    given = parser().parse_args(arguments)
    from nmt_train import device
    from nmt_train.common.errors import UserError
    from nmt_train.corpus.text import decode_lines
    from nmt_train.load_model import load_model
    from nmt_train.model.beam_search import SearchConfig
    from nmt_train.model.translator import Translator
    from nmt_train.run.folder import newest

    if given.n_best is not None and given.n_best > given.beam:
        raise UserError(f"command line: --n-best {given.n_best} needs a --beam of at least as many, not {given.beam}")
    own = device.prepare(given.devices, given.threads)
    model, vocabulary, _ = load_model(newest(given.model, given.average), own)
    search = SearchConfig(beam=given.beam, normalisation=given.normalisation)
    translator = Translator(model, vocabulary, search, given.batch_tokens)
    if sys.stdin is None:
        raise UserError("standard input is closed; give the lines to translate, as in nmt-translate --model RUN < FILE")
    window = given.window or (1 if sys.stdin.isatty() else 2000)
    lines = decode_lines(sys.stdin.buffer, "standard input")
    for number, found in enumerate(translator.stream(lines, window)):
        if given.n_best is None:
            output = found[0][0] + "\n"
        else:
            output = "".join(
                f"{number} ||| {text} ||| {hypothesis.log_probability:.4f} ||| {hypothesis.score:.4f}\n"
                for text, hypothesis in found[: given.n_best]
            )
        sys.stdout.buffer.write(output.encode("utf-8"))
        if window == 1:
            sys.stdout.buffer.flush()
    sys.stdout.buffer.flush()
    if translator.cut:
        print(f"warning: {translator.cut} lines were longer than 1,000 pieces and were cut", file=sys.stderr)
    return 0


def main() -> None:
    sys.exit(cli.run(command))
