"""Train on a simulated cluster: run all ranks of `nmt-train` in this process, on a virtual clock."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from signal import Signals
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm

from nmt_train import device
from nmt_train.common import launcher
from nmt_train.common.errors import UserError
from nmt_train.common.plural import counted
from nmt_train.common.streams import tell
from nmt_train.config import Config
from nmt_train.launch.stop_request import handling
from nmt_train.modes.resolve import choose_mode, resolve
from nmt_train.simulation.adviser.compare import choices, compare, sizes
from nmt_train.simulation.adviser.measure import cluster_file, machines
from nmt_train.simulation.cluster import ClusterConfig
from nmt_train.simulation.cluster_file import described, to_yaml
from nmt_train.simulation.compatibility import check
from nmt_train.simulation.engine import Engine
from nmt_train.simulation.network import Network
from nmt_train.simulation.profile import Effort, Say, nothing
from nmt_train.simulation.profile import measure as measure_device
from nmt_train.simulation.timing import Timing, count, measure, model_and_batches, shapes_of
from nmt_train.simulation.virtual_transport import VirtualTransport
from nmt_train.training.defaults import follow, lead, without_device
from nmt_train.training.fault_tolerance import Rank
from nmt_train.training.prepared_run import opened
from nmt_train.training.setup import maker
from nmt_train.training.start import connect, refuse_worlds_of_one
from nmt_train.training.worker import Make
from nmt_train.transport import Aborted, Transport

_ANOTHER = 1.5  # a model whose size differs by more than this factor is another one than was measured
# --measure has nine series of steps, and should take two minutes at most.
_MEASURED = Effort(steps=20, rounds=2, seconds=6.0)


def simulate(config: Config, cluster: ClusterConfig, force: bool, overwrite: bool, shuffle_seed: int | None = None) -> int:
    """Train with `config` on the simulated `cluster`; return the exit status of training.

    shuffle_seed: if given, delay messages randomly, to test other orders of delivery. Raises UserError for errors that a user
    can fix.
    """
    given, config = config, choose_mode(config, len(cluster.ranks()))
    check(cluster, config)
    own = device.prepare(config.devices, config.threads)
    start = time.perf_counter()
    with opened(config, force, overwrite, described(cluster), given.mode is None) as ready:
        config, ready.decided = without_device(config, ready.stores, cluster.ranks(), ready.saved, ready.initial)
        elements = count(shapes_of(config, ready.vocabulary.size))
        _warn_of_other_model(cluster, elements)
        network = Network(cluster.with_codec(resolve(config, cluster.ranks())), elements, shuffle_seed)
        engine = Engine(
            network, config.transport.deadline, start=ready.saved.facts["progress"]["seconds"] if ready.saved else 0.0
        )

        listeners: list[Callable[[Signals], None]] = []  # one of each rank

        def ask(wanted: Signals) -> None:
            for listener in listeners:
                listener(wanted)

        def signals(listener: Callable[[Signals], None]) -> nullcontext[None]:
            listeners.append(listener)
            return nullcontext()

        make = maker(config, own, ready.vocabulary, ready.stores)  # shared, so that batches are arranged once for all ranks

        def main(transport: VirtualTransport) -> int:
            rank = Rank(config, make, signals, lambda begun: nullcontext(ready))
            return rank.train(transport, ready if transport.rank == 0 else None)

        with handling(ask):
            statuses = engine.run([partial(main, transport) for transport in engine.transports])
    if not statuses:
        raise UserError("cluster: all ranks have failed (crashes, kills), so nobody trains any more; let some of them survive")
    _sum_up(engine.transports[0].now(), len(statuses), start)
    return int(max(statuses))


def time_only(config: Config, cluster: ClusterConfig, steps: int) -> Timing:
    """Simulate `steps` steps on every rank with the batch sizes of the corpus, without computing anything.

    Writes `timing.json` to the run folder, and traces if configured. Raises UserError for errors that a user can fix.
    """
    config = choose_mode(config, len(cluster.ranks()))
    check(cluster, config)
    start = time.perf_counter()
    with opened(config, False, False, described(cluster), trains=False) as ready:
        config, decided = without_device(config, ready.stores, cluster.ranks(), ready.saved, ready.initial)
        for sentence in decided:
            _say(f"decided: {sentence}")
        shapes, tokens = model_and_batches(config, ready.vocabulary, ready.stores)
        _warn_of_other_model(cluster, count(shapes))
        timing = measure(config, cluster, shapes, tokens, steps)
        timing.write(ready.run.folder)
    print(timing.table(), end="")
    _sum_up(timing.seconds, len(timing.ranks), start)
    return timing


def advise(config: Config, cluster: ClusterConfig) -> None:
    """Print how all modes compare on the cluster, and which one to use; write both to the run folder.

    Raises UserError for errors that a user can fix.
    """
    with opened(dataclasses.replace(config, mode="single"), False, False, described(cluster), trains=False) as ready:
        # Its own mode may not fit the cluster, and does not matter.
        alone, decided = without_device(
            dataclasses.replace(config, mode="single"), ready.stores, (0,), ready.saved, ready.initial
        )
        config = dataclasses.replace(alone, mode=config.mode)
        shapes, tokens = model_and_batches(config, ready.vocabulary, ready.stores)
        _warn_of_other_model(cluster, count(shapes))
        for sentence in decided:
            _say(f"decided: {sentence}")
        with tqdm(total=1.0, leave=False, disable=None, bar_format="{percentage:3.0f}% |{bar}| {desc}") as bar:

            def progress(done: int, total: int, what: str) -> None:
                bar.set_description_str(what, refresh=False)
                bar.update(done / total - bar.n)

            wanted = [(choice, machines) for machines in sizes(cluster) for choice in choices()]
            found = compare(config, cluster, shapes, tokens, wanted, progress)
        found.write(ready.run.folder)
        print(f"{found.table()}\n{found.advice()}")
        tell(f"{ready.run.folder / 'compare.json'} and compare.png have the same.")


def measure_machines(config: Config, steps: int | None) -> int:
    """Measure the machines of this job together with its other ranks; the first rank prints a cluster file.

    If this process is the only rank, it prints the `profile` of its device. steps: for each kind of work; None: as many as
    there is time for, up to 20. Returns the exit status. Raises UserError for errors that a user can fix.
    """
    effort = _MEASURED if steps is None else Effort(steps)
    try:
        with _measuring(config) as (config, transport, own, make, say):
            if transport.size == 1 < launcher.tasks():
                return refuse_worlds_of_one()
            if transport.size == 1:
                _say("one device: the result is for the key `profile` of a cluster file")
                print(to_yaml(measure_device(config, make, transport, effort, say), _title(config)), end="")
                return 0
            found = machines(config, make, own, transport, effort, seconds=2.0, say=say)
    except Aborted:
        time.sleep(launcher.LINGER)  # another rank has said why; its exit status should become that of the job
        return 1
    if found is not None:
        print(cluster_file(found), end="")
        if found.warning:
            _say(found.warning)
    return 0


def _title(config: Config) -> str:
    """What was measured."""
    sizes = f"batches of {config.batch.tokens if config.batch.sentences is None else config.batch.sentences} "
    sizes += "tokens" if config.batch.sentences is None else "sentences"
    return f"Measured on {platform.node()} with {sizes}, {config.precision}, preset {config.model.preset}"


@contextmanager
def _measuring(config: Config) -> Iterator[tuple[Config, Transport, torch.device, Make, Say]]:
    """What to measure: the configuration, with what it leaves open decided for these devices; the transport of this rank, its
    device, a function that builds workers, and one that speaks. Needs no run folder."""
    transport = connect(config.transport)
    try:
        own = device.prepare(config.devices, config.threads, transport.nodes, transport.rank)
        with TemporaryDirectory() as folder, opened(dataclasses.replace(config, run=folder), False, False) as ready:
            say = nothing if transport.rank else _say
            if transport.rank:
                config = follow(config, transport, own, ready.vocabulary, ready.stores)
            else:
                config, _ = lead(config, transport, own, ready.vocabulary, ready.stores, None, ready.initial, say)
            yield config, transport, own, maker(config, own, ready.vocabulary, ready.stores), say
    except BaseException as error:
        transport.fail(error)
        raise
    transport.close()


def _warn_of_other_model(cluster: ClusterConfig, elements: int) -> None:
    """Say if the forward and backward pass were measured with a model of another size."""
    measured = cluster.device.parameters if cluster.device else None
    charged = cluster.scale.parameters if cluster.scale else elements
    if measured and not 1 / _ANOTHER < charged / measured < _ANOTHER:
        _say(
            f"warning: the times of the cluster file are those of a model with {measured / 1e6:.3g}M parameters, and this one"
            f" has {charged / 1e6:.3g}M: do not trust words/s and advice; measure your model with nmt-simulate --measure"
        )


def _say(what: str) -> None:
    tell(f"nmt-simulate: {what}")


def _sum_up(seconds: float, ranks: int, start: float) -> None:
    tell(f"simulated {seconds:.1f} s of {counted(ranks, 'rank')} in {time.perf_counter() - start:.1f} s")
