"""nmt-train: train a model, or continue a run."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nmt_train import cli
from nmt_train.cli import example
from nmt_train.cli import options as settings
from nmt_train.common import launcher
from nmt_train.common.errors import UserError
from nmt_train.common.paths import expanded
from nmt_train.common.streams import tell
from nmt_train.corpus import cache, opustrainer
from nmt_train.launch.restarts import Host, Job, read_hosts

if TYPE_CHECKING:
    from nmt_train.config import Config
    from nmt_train.corpus.store import Stores
    from nmt_train.corpus.vocabulary import Vocabulary
    from nmt_train.training.auto_mode import Adviser

_EXAMPLES = """
  nmt-train --example one-device                           # writes a recipe into this folder; --example lists all
  nmt-train --config mine.yml                              # on a GPU if there is one, else on the CPU
  nmt-train --config mine.yml --stop.after 20e             # every key of the configuration is an option
  nmt-train --config mine.yml --devices all                # on all GPUs of this machine
  nmt-train --config mine.yml --mode auto --hosts hosts       # several machines; hosts has lines like: node1 slots=1
  nmt-train --config mine.yml --check                      # what can be known in seconds, before a night is spent
  nmt-train --config mine.yml --print-config               # what you, the mode and the defaults choose
  nmt-train --help optimizer                               # what a key or section means
"""


def parser() -> cli.Parser:
    options = settings.parser(
        "nmt-train", "Train a translation model. To resume an interrupted run, repeat the command.", _EXAMPLES
    )
    options.add_argument(
        "--hosts",
        type=expanded,
        metavar="FILE",
        help="start ranks on the machines in this hostfile: one NAME slots=RANKS per line",
    )
    options.add_argument(
        "--restarts", type=cli.count, default=0, metavar="N",
        help="if the job fails, restart it up to N times on the machines that still respond (default: 0)",
    )  # fmt: skip
    options.add_argument(
        "--example",
        nargs="*",
        metavar=("NAME", "FOLDER"),
        help="write a recipe (a README and a configuration for a common task) into a new folder (default: ./NAME), and exit;"
        " without NAME, list the recipes",
    )
    options.add_argument(
        "--check",
        action="store_true",
        help="train nothing: read the corpora, print what can be known before training (text, memory, disk space, what the"
        " start decides), with warnings and what prevents training, which makes the exit status 2",
    )
    options.add_argument(
        "--opustrainer",
        type=expanded,
        metavar="FILE",
        help="print a configuration with the mixture (datasets, stages, weights, modifiers) of a file of OpusTrainer, and exit",
    )
    options.add_argument(
        "--empty-cache",
        action="store_true",
        help="remove all tokenized corpora and vocabularies that no running process uses (see corpus.cache), and exit; a run"
        " that resumes tokenizes its corpus again",
    )
    options.add_argument(
        "--completion", action="store_true", help="print a script that completes options and keys in bash and zsh, and exit"
    )
    settings.add_keys(options)
    return options


def command(arguments: Sequence[str]) -> int:
    options = parser()
    if not arguments and not launcher.launched():
        tell(settings.short_help(options))
        return UserError.status
    given = settings.parse(options, arguments)
    if given.example is not None:
        return _example(options, given.example)
    if given.completion:
        from nmt_train.cli import completion

        print(completion.script(parser()), end="")
        return 0
    if given.opustrainer is not None:
        print(opustrainer.convert(given.opustrainer), end="")
        return 0
    if given.empty_cache:
        configured = settings.resolve(given).corpus.cache if given.config else vars(given)["corpus.cache"]
        folder = cache.folder(configured)
        if folder is None:
            raise UserError("--empty-cache: the home folder is not known; name the folder with --corpus.cache")
        removed, size = cache.empty(folder)
        tell(f"{folder}: tokenized corpora and vocabularies removed: {removed}, {size / 1e9:.2f} GB")
        return 0
    try:
        resolved = settings.resolve(given)
        if given.print_config:
            settings.print_config(resolved)
            return 0
        launcher.refuse_torchrun()
        if given.check and launcher.launched():
            raise UserError("--check: is one process; start it without mpirun or srun (--hosts tells it the number of ranks)")
        settings.keep_files(given, resolved)
        from nmt_train.training.start import check, start  # imports the slow parts of torch, which --help does not need

        hosts = read_hosts(given.hosts) if given.hosts and not launcher.launched() else []
        devices = check(resolved, hosts)
        if given.check:
            return _check(given, resolved, hosts, len(devices))
    except UserError as error:
        if launcher.launched() and launcher.local_rank():
            launcher.wait_for_first_rank()  # which usually has the same error, prints it, and ends the job
            error.add_note(f"local rank {launcher.local_rank()} of host {socket.gethostname()}")
        raise
    overwrite = given.overwrite and not launcher.queued_again()  # after a requeue, keep what the job has written
    return start(resolved, given.force, overwrite, Job(hosts, given.restarts, arguments), _adviser)


def _check(given: argparse.Namespace, config: Config, hosts: Sequence[Host], devices: int) -> int:
    """Print what can be known before training. devices: how many of this machine train, if there are no hosts."""
    from nmt_train import device
    from nmt_train.check.check import check
    from nmt_train.training.start import nodes_of

    check(
        config,
        nodes_of(hosts, devices),
        device.prepare(config.devices, config.threads, tells=False),
        given.force,
        given.overwrite,
    )
    return 0


def _example(options: cli.Parser, words: list[str]) -> int:
    """Write the recipe that these words (a name, a folder) ask for, or list all."""
    if not words:
        print(f"Recipes (nmt-train --example NAME [FOLDER] writes one):\n{example.listing()}", end="")
        return 0
    if len(words) > 2:
        options.error(f"--example takes a name and a folder; {words[2]} is too much")
    folder = expanded(words[1] if len(words) == 2 else words[0])
    example.write(words[0], folder)
    tell(f"{folder}: written; {folder / 'README.md'} says how to use it")
    return 0


def _adviser(config: Config, vocabulary: Vocabulary, stores: Stores) -> Adviser:
    """The adviser of `mode: auto`; only this mode needs to import it."""
    from nmt_train.simulation.adviser.auto import AutoAdviser

    return AutoAdviser(config, vocabulary, stores)


def main() -> None:
    cli.run_rank(command)


if __name__ == "__main__":
    main()
