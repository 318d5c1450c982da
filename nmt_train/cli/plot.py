"""nmt-plot: draw figures of runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nmt_train import cli
from nmt_train.common.errors import UserError
from nmt_train.common.metric import METRICS
from nmt_train.common.paths import expanded
from nmt_train.common.section import listed
from nmt_train.report import convergence, timeline


def parser() -> cli.Parser:
    options = cli.Parser(prog="nmt-plot", description="Draw figures of runs: metrics over time, or a timeline of a trace.")
    kinds = options.add_subparsers(dest="kind", required=True)
    for name, metric, text in (
        ("convergence", None, "a validation metric against wall-clock time, with a CSV"),
        ("cost", "cost", "the training cost against wall-clock time, with a CSV"),
        ("learning-rate", "learning_rate", "the learning rate against wall-clock time, with a CSV"),
    ):
        curves = kinds.add_parser(name, help=text)
        curves.add_argument("runs", nargs="+", type=expanded, metavar="RUN")
        if metric is None:
            curves.add_argument(
                "--metric", default="cross-entropy", help=f"{listed(METRICS)}, command, or on another validation set: bleu@news"
            )
        else:
            curves.set_defaults(metric=metric)
        curves.add_argument(
            "--clock", choices=list(convergence.CLOCKS), default="seconds",
            help="time axis; training_seconds excludes validations during which no rank trains (default:"
            " seconds)",
        )  # fmt: skip
        _add_output(curves, ".png, .svg or .pdf", "in the run folder; with several RUNs, in the working directory")
    spans = kinds.add_parser("timeline", help="what every rank does in a time window, from a trace")
    spans.add_argument(
        "runs", nargs="+", type=expanded, metavar="RUN", help="several: one row each, what the worker of rank 0 does"
    )
    spans.add_argument(
        "--start", type=cli.finite, default=None, metavar="S",
        help="start of the window, of a single RUN [seconds] (default: after ten steps)",
    )  # fmt: skip
    spans.add_argument(
        "--seconds", type=cli.finite, default=None, metavar="S",
        help="length of the window [seconds] (default: ten steps; with several RUNs, two of the slowest)",
    )  # fmt: skip
    _add_output(spans, ".png, .svg or .pdf", "in the run folder; with several RUNs, in the working directory")
    aligned = kinds.add_parser("alignment", help="a translation, and which words of its source its words come from")
    aligned.add_argument("run", type=expanded, metavar="RUN", help="run folder or checkpoint with a guided attention head")
    aligned.add_argument("source", metavar="SENTENCE", help="the line to translate")
    _add_output(aligned, ".png, .svg or .pdf")
    trace = kinds.add_parser("trace", help="export a trace for other programs")
    trace.add_argument("run", type=expanded, metavar="RUN")
    trace.add_argument("--chrome", action="store_true", required=True, help="Trace Event JSON, for ui.perfetto.dev")
    _add_output(trace, "JSON")
    return options


def _add_output(kind: argparse.ArgumentParser, form: str, default: str = "in the run folder") -> None:
    kind.add_argument(
        "--output",
        type=expanded,
        default=None,
        metavar="FILE",
        help=f"{form} (default: {default})",
    )
    kind.add_argument("--debug", action="store_true", help="print the stack trace of an error")


def command(arguments: Sequence[str]) -> int:
    given = parser().parse_args(arguments)
    runs = given.runs if "runs" in given else [given.run]
    shown = f"-{given.metric}" if given.kind == "convergence" and given.metric != "cross-entropy" else ""
    name = "trace.json" if given.kind == "trace" else f"{given.kind}{shown}.png"
    inside = len(runs) == 1 and runs[0].is_dir() and not (runs[0] / "checkpoint.json").exists()  # a checkpoint stays as it is
    output = given.output or (runs[0] / name if inside else Path(name))
    try:
        if "metric" in given:
            written = convergence.plot(runs, given.metric, given.clock, output)
        elif given.kind == "alignment":
            from nmt_train.report import alignment

            written = alignment.plot(given.run, given.source, output)
        elif given.kind == "timeline" and len(runs) > 1:
            if given.start is not None:
                raise UserError("--start: of a single RUN only; with several, every window begins after ten steps")
            written = timeline.compare(runs, given.seconds, output)
        elif given.kind == "timeline":
            written = timeline.plot(runs[0], given.start, given.seconds, output)
        else:
            written = timeline.chrome(given.run, output)
    except OSError as error:
        raise UserError(
            f"{error.filename or output}: {error.strerror}; name a file that can be written with --output"
        ) from None
    print(*written, sep="\n")
    return 0


def main() -> None:
    sys.exit(cli.run(command))
