"""nmt-plot: draw figures of runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nmt_train import cli
from nmt_train.common.metric import METRICS
from nmt_train.report import convergence, timeline


def parser() -> cli.Parser:
    options = cli.Parser(
        prog="nmt-plot", allow_abbrev=False, description="Draw figures of runs: metrics over time, or a timeline of a trace."
    )
    kinds = options.add_subparsers(dest="kind", required=True)
    curves = kinds.add_parser("convergence", help="a validation metric against wall-clock time, with a CSV")
    curves.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    curves.add_argument("--metric", choices=list(METRICS), default="cross-entropy")
    curves.add_argument(
        "--clock",
        choices=list(convergence.CLOCKS),
        default="seconds",
        help="training_seconds: without validation and checkpoints",
    )
    curves.add_argument("--output", type=Path, default=Path("convergence.png"), metavar="FILE", help=".png, .svg or .pdf")
    spans = kinds.add_parser("timeline", help="what every rank does in a window of time, from a trace")
    spans.add_argument("run", type=Path, metavar="RUN")
    spans.add_argument(
        "--start", type=cli.finite, default=None, metavar="S", help="start of the window [seconds] (default: after ten steps)"
    )
    spans.add_argument(
        "--seconds", type=cli.finite, default=None, metavar="S", help="length of the window [seconds] (default: ten steps)"
    )
    spans.add_argument("--output", type=Path, default=Path("timeline.png"), metavar="FILE", help=".png, .svg or .pdf")
    trace = kinds.add_parser("trace", help="export a trace for other programs")
    trace.add_argument("run", type=Path, metavar="RUN")
    trace.add_argument("--chrome", action="store_true", required=True, help="Trace Event JSON, for ui.perfetto.dev")
    trace.add_argument("--output", type=Path, default=Path("trace.json"), metavar="FILE")
    for kind in (curves, spans, trace):
        kind.add_argument("--debug", action="store_true", help="print the stack trace of an error")
    return options


def command(arguments: Sequence[str]) -> int:
    given = parser().parse_args(arguments)
    if given.kind == "convergence":
        written = convergence.plot(given.runs, given.metric, given.clock, given.output)
    elif given.kind == "timeline":
        written = timeline.plot(given.run, given.start, given.seconds, given.output)
    else:
        written = timeline.chrome(given.run, given.output)
    print(*written, sep="\n")
    return 0


def main() -> None:
    sys.exit(cli.run(command))
