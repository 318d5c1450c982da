"""nmt-validate: print a table of metrics with one row per checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from nmt_train import cli
from nmt_train.common.duration import Duration
from nmt_train.common.errors import UserError
from nmt_train.common.metric import COMMAND, METRICS
from nmt_train.common.paths import expanded
from nmt_train.model.bleu import AUTO, TOKENIZERS

_USUAL = ("cross-entropy", "perplexity", "bleu", "chrf")
_LIMIT = Duration.parse("24h")  # of --command: nobody waits for it but the user


def parser() -> cli.Parser:
    options = cli.Parser(prog="nmt-validate", description="Measure checkpoints on a test set; one table row each.")
    options.add_argument(
        "paths", nargs="+", type=expanded, metavar="RUN_OR_CHECKPOINT",
        help="a run: all of its checkpoints (--score, --compare: the newest)",
    )  # fmt: skip
    options.add_argument(
        "--test", nargs="+", metavar="FILE", help="source and target, or one .tsv file (default: the run's corpus.valid)"
    )
    options.add_argument(
        "--average", type=cli.positive, default=None, metavar="N", help="average each run's last N checkpoints into one row"
    )
    options.add_argument(
        "--metrics", nargs="+", choices=list(METRICS), default=list(_USUAL), metavar="NAME",
        help=f"any of {', '.join(METRICS)} (default: {' '.join(_USUAL)})",
    )  # fmt: skip
    options.add_argument(
        "--command",
        help="also measure the score that a shell command prints in its last line, such as COMET; as validation.command",
    )
    options.add_argument(
        "--tokenize", choices=list(TOKENIZERS), default=AUTO, metavar="NAME",
        help=f"sacreBLEU's tokenizer for BLEU: {', '.join(TOKENIZERS)} (default: auto, by the script of the references)",
    )  # fmt: skip
    options.add_argument(
        "--score",
        action="store_true",
        help="instead of the table, print the log-probability of each target under one model, one line per pair",
    )
    options.add_argument(
        "--compare",
        action="store_true",
        help="test whether the metrics of translations of each model differ significantly from those of the first (paired"
        " bootstrap)",
    )
    options.add_argument("--json", action="store_true", help="print one JSON object per row instead of the table")
    cli.add_model_options(options)
    return options


def command(arguments: Sequence[str]) -> int:
    given = parser().parse_args(arguments)
    from nmt_train import device
    from nmt_train.model.metrics import ValidationConfig
    from nmt_train.report import significance
    from nmt_train.report.table import measure, score, table

    own = device.prepare_one(given.devices, given.threads)
    if given.compare and given.score:
        raise UserError("command line: give either --compare or --score")
    if given.command and (given.compare or given.score):
        raise UserError("command line: --command is for the table; leave out --compare and --score")
    if given.score:
        if given.json:
            raise UserError("command line: --json is for the table and --compare; --score prints one number per line")
        if len(given.paths) > 1:
            raise UserError(f"command line: --score is for one model; there are {len(given.paths)}: give one")
        for value in score(given.paths[0], given.average or 1, given.test, given.batch_tokens, own):
            print(f"{value:.6f}")
        return 0
    settings = ValidationConfig(
        metrics=given.metrics, bleu_tokenizer=given.tokenize, beam=given.beam, normalization=given.normalization,
        batch_tokens=given.batch_tokens, command=given.command, command_limit=_LIMIT,
    )  # fmt: skip
    if given.compare:
        compared = significance.compare(given.paths, given.average or 1, given.test, settings, own)
        print(*map(json.dumps, compared), sep="\n") if given.json else print(significance.table(compared))
        return 0
    rows = []
    try:
        for row in measure(given.paths, given.average, given.test, settings, own):
            rows.append(row)
            if given.json:
                print(json.dumps(row), flush=True)
    finally:  # a run that still trains may have deleted a later checkpoint
        if rows and not given.json:
            print(table(rows, [*given.metrics, *([COMMAND] if given.command else [])]))
    return 0


def main() -> None:
    sys.exit(cli.run(command))
