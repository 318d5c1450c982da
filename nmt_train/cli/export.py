"""nmt-export: write a trained model as a folder that other programs can load."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nmt_train import cli
from nmt_train.common.errors import UserError
from nmt_train.common.paths import expanded
from nmt_train.common.streams import tell
from nmt_train.model_formats import QUANTIZATIONS, TARGETS


def parser() -> cli.Parser:
    options = cli.Parser(
        prog="nmt-export",
        description="Write a trained model as a folder for Hugging Face transformers, CTranslate2 or Marian. Its README.md says"
        " how to use it. The first two need: pip install '.[export]' in the project's folder.",
    )
    options.add_argument(
        "model", type=expanded, metavar="RUN", help="run folder (its last checkpoint) or a checkpoint such as RUN/best-bleu"
    )
    options.add_argument("out", type=expanded, metavar="OUT", help="the new folder")
    options.add_argument("--to", required=True, choices=TARGETS, help="the program that will load OUT")
    options.add_argument("--average", type=cli.positive, default=1, metavar="N", help="average the run's last N checkpoints")
    options.add_argument(
        "--quantize", choices=QUANTIZATIONS, default=None, help="number format of the weights, for ctranslate2 (default: fp32)"
    )
    cli.add_search_options(options)
    options.add_argument("--debug", action="store_true", help="print the stack trace of an error")
    return options


def command(arguments: Sequence[str]) -> int:
    given = parser().parse_args(arguments)
    from nmt_train.model.beam_search import SearchConfig
    from nmt_train.model_formats.export import export
    from nmt_train.run.folder import newest

    if given.quantize and given.to != "ctranslate2":
        raise UserError(f"command line: --quantize is for --to ctranslate2; {given.to} stores fp32")
    search = SearchConfig(beam=given.beam, normalization=given.normalization)
    export(newest(given.model, given.average), given.to, given.out, given.quantize, search)
    tell(f"{given.out}: written; {given.out / 'README.md'} says how to use it")
    return 0


def main() -> None:
    sys.exit(cli.run(command))
