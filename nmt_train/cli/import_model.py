"""nmt-import: read a model of another program, for translation, fine-tuning and export."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nmt_train import cli
from nmt_train.common.paths import expanded
from nmt_train.common.streams import tell


def parser() -> cli.Parser:
    options = cli.Parser(
        prog="nmt-import",
        description="Read a model of Marian (.npz), or the Hugging Face folder of a MarianMT (as of OPUS-MT), M2M100 or"
        " NLLB model, and write it as a checkpoint that nmt-translate, nmt-validate, nmt-export and the key init of nmt-train"
        " accept.",
    )
    options.add_argument(
        "model", type=expanded, metavar="MODEL",
        help="a .npz file; or a folder with config.json, the weights, and the files of the tokenizer",
    )  # fmt: skip
    options.add_argument("out", type=expanded, metavar="OUT", help="the new checkpoint")
    options.add_argument(
        "--vocab", type=expanded, nargs="+", default=[], metavar="SPM",
        help="vocabulary of a .npz file, for both sides, or those of source and target",
    )  # fmt: skip
    options.add_argument("--from", dest="source", metavar="LANG", help="source language of an M2M100 or NLLB model: eng_Latn")
    options.add_argument("--to", dest="target", metavar="LANG", help="target language of an M2M100 or NLLB model")
    options.add_argument("--debug", action="store_true", help="print the stack trace of an error")
    return options


def command(arguments: Sequence[str]) -> int:
    given = parser().parse_args(arguments)
    from nmt_train.model_formats.importing import import_model

    tell(import_model(given.model, given.vocab, given.out, (given.source, given.target)))
    return 0


def main() -> None:
    sys.exit(cli.run(command))
