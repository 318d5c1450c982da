"""nmt-validate: print a table of metrics with one row per checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nmt_train import cli

_METRICS = ["cross-entropy", "perplexity", "bleu", "chrf"]


def parser() -> cli.Parser:
    options = cli.Parser(
        prog="nmt-validate", allow_abbrev=False, description="Measure checkpoints on a test set: one table row each."
    )
    options.add_argument("paths", nargs="+", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run means all of its checkpoints")
    options.add_argument(
        "--test", nargs="+", metavar="FILE", help="source and target, or one .tsv file (default: the run's corpus.valid)"
    )
    options.add_argument(
        "--average", type=cli.positive, default=None, metavar="N", help="average each run's last N checkpoints into one row"
    )
    options.add_argument("--metrics", nargs="+", choices=_METRICS, default=_METRICS, help="which (default: all)")
    options.add_argument("--beam", type=cli.positive, default=5, metavar="N", help="hypotheses kept per sentence (default 5)")
    options.add_argument("--normalisation", type=cli.power, default=1.0, metavar="X", help="length normalisation (default 1)")
    options.add_argument("--batch-tokens", type=cli.positive, default=2048, metavar="N", help="pieces per batch")
    options.add_argument("--devices", default="auto", help="auto, cpu, cuda or a GPU's number (default auto)")
    options.add_argument(
        "--threads",
        type=cli.threads,
        default=0,
        metavar="N",
        help="compute threads on the CPU; 0: OMP_NUM_THREADS, else one per core",
    )
    options.add_argument("--json", action="store_true", help="print one JSON object per row instead of the table")
    options.add_argument("--debug", action="store_true", help="show the stack of an error")
    return options


def command(arguments: Sequence[str]) -> int:
    given = parser().parse_args(arguments)
    from nmt_train import device
    from nmt_train.model.metrics import ValidationConfig
    from nmt_train.report.table import measure, table

    own = device.prepare(given.devices, given.threads)
    settings = ValidationConfig(
        metrics=given.metrics, beam=given.beam, normalisation=given.normalisation, batch_tokens=given.batch_tokens
    )
    rows = []
    for row in measure(given.paths, given.average, given.test, settings, own):
        rows.append(row)
        if given.json:
            print(json.dumps(row), flush=True)
    if not given.json:
        print(table(rows, given.metrics))
    return 0


def main() -> None:
    sys.exit(cli.run(command))
