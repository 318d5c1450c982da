"""Start training: alone, or with other ranks after a check that all have the same version, configuration and corpus."""

from __future__ import annotations

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import nmt_train
from nmt_train import config as configuration
from nmt_train import device
from nmt_train.common import launcher
from nmt_train.common.errors import UserError
from nmt_train.common.message import Message, from_bytes, from_json, to_bytes, to_facts
from nmt_train.common.paths import expanded
from nmt_train.common.section import as_list
from nmt_train.common.streams import tell
from nmt_train.common.yaml_file import flatten
from nmt_train.config import Config
from nmt_train.corpus.store import Stores, open_stores
from nmt_train.corpus.vocabulary import Vocabulary
from nmt_train.launch.restarts import Host, Job, supervise
from nmt_train.launch.stop_request import handling
from nmt_train.modes.auto import AUTO
from nmt_train.modes.resolve import choose_mode, resolve
from nmt_train.training import auto_mode, defaults
from nmt_train.training.auto_mode import Advisers, ChosenMode
from nmt_train.training.fault_tolerance import Rank
from nmt_train.training.prepared_run import opened, taken_over
from nmt_train.training.setup import maker
from nmt_train.training.worker import Make
from nmt_train.transport import Aborted, Tag, Transport, TransportConfig, describe
from nmt_train.transport.collective import gather
from nmt_train.transport.local import LocalTransport

_ALONE = Job()
# Configuration keys that may differ between ranks.
_LOCAL = ("run", "init", "threads", "devices", "corpus.train", "corpus.valid", "corpus.cache")


def start(config: Config, force: bool, overwrite: bool, job: Job = _ALONE, advisers: Advisers | None = None) -> int:
    """Train with `config`; returns the exit status.

    The status is 0, 1 if another rank failed, 128 + the number of the signal that ended training, or that of a supervised job.
    force: continue although the configuration changed. overwrite: delete the previous contents of the run folder. job: how to
    run the command as several ranks, if wanted. advisers: makes the adviser of `mode: auto`. Raises UserError for errors that a
    user can fix; an error found before training leaves a previous run in the folder unchanged.
    """
    devices = check(config, job.hosts)
    if (len(devices) > 1 or job.hosts or job.restarts) and not launcher.launched():
        return supervise(job, len(devices))
    transport = connect(config.transport)
    if transport.size == 1 < launcher.tasks():
        return refuse_worlds_of_one()
    given, config = config, choose_mode(config, transport.size)
    try:
        status = (
            _lead(config, transport, force, overwrite, given.mode is None, advisers)
            if transport.rank == 0
            else _follow(config, transport, overwrite, advisers)
        )
    except Aborted:
        time.sleep(launcher.LINGER)  # the failed rank has reported why; its exit status should become that of the job
        return 1
    except BaseException as error:
        transport.fail(error)
        if transport.rank or (transport.size > 1 and not isinstance(error, UserError)):
            error.add_note(describe(transport, transport.rank))  # begins the error message
        raise
    return status


def check(config: Config, hosts: Sequence[Host] = ()) -> list[torch.device]:
    """The devices of this machine; raises UserError for errors that all ranks have in common, before the ranks connect.

    hosts: the machines on which the job will run. If there are any, the machine that starts the job needs no device.
    """
    devices = device.choose(config.devices) if launcher.launched() or not hosts else []
    device.known(config.devices)
    if launcher.launched():
        if config.mode not in (None, AUTO):  # these are decided after the ranks have connected
            resolve(config)
    elif config.mode != AUTO:
        resolve(config, nodes_of(hosts, len(devices)))
    return devices


def nodes_of(hosts: Sequence[Host], devices: int) -> tuple[int, ...]:
    """The machine of each rank of a job that nmt-train starts itself. devices: how many of this one, if there are no hosts."""
    return tuple(node for node, host in enumerate(hosts) for _ in range(host.slots)) or (0,) * devices


def connect(config: TransportConfig) -> Transport:
    """The transport of this rank: MPI if an MPI launcher started this process, else a local one for a single rank."""
    if not launcher.launched():
        return LocalTransport()
    from nmt_train.transport.mpi.transport import MpiTransport

    return MpiTransport(config)


def refuse_worlds_of_one() -> int:
    """Raise UserError in the first srun task; the other tasks find the same error and return its exit status."""
    if os.environ.get("SLURM_PROCID", "0") != "0":
        launcher.wait_for_first_rank()
        return UserError.status
    offered = os.environ.get("SLURM_MPI_TYPE", "none")
    raise UserError(
        f"MPI: srun started {launcher.tasks()} tasks, but each finds itself alone: this MPI library does not understand"
        f" --mpi={offered}; start them with srun --mpi=pmix (srun --mpi=list shows whether it is available), or run mpirun in"
        " an sbatch job"
    )


def _lead(
    config: Config, transport: Transport, force: bool, overwrite: bool, mode_chosen: bool, advisers: Advisers | None
) -> int:
    own = device.prepare(config.devices, config.threads, transport.nodes, transport.rank)
    if config.mode != AUTO:
        resolve(config, transport.nodes)
    types, gpus = _compare_devices(config, transport, own)
    if config.mode != AUTO:
        _refuse_unequal(config, transport, types)
    with opened(config, force, overwrite, mode_chosen=mode_chosen) as prepared:
        vocabulary, stores, folder = prepared.vocabulary, prepared.stores, prepared.run.folder
        _agree(config, transport, vocabulary, stores)
        config, said = defaults.lead(config, transport, own, vocabulary, stores, prepared.saved, prepared.initial, _say)
        make = maker(config, own, vocabulary, stores)
        if advisers is not None and config.mode == AUTO:
            adviser = advisers(config, vocabulary, stores)
            prepared.auto = auto_mode.lead(config, transport, own, make, adviser, prepared.saved, folder)
            config = prepared.auto.config
            _refuse_unequal(config, transport, types)
        config, of_mode = defaults.lead_mode(config, transport, stores, gpus)
        prepared.decided = [*said, *of_mode]
        if prepared.auto is not None:
            prepared.auto.config = config
        status = _rank(config, make, vocabulary, stores, prepared.auto, overwrite).train(transport, prepared)
        return status if transport.size == 1 or launcher.tasks() else 0  # mpirun itself reports what ended its ranks


def _follow(config: Config, transport: Transport, overwrite: bool, advisers: Advisers | None) -> int:
    own = device.prepare(config.devices, config.threads, transport.nodes, transport.rank)
    _compare_devices(config, transport, own)
    vocabulary = _accept(config, transport)
    first = transport.nodes.index(transport.nodes[transport.rank])
    if first != transport.rank:
        transport.receive(first, Tag.HELLO).result()  # sent when that rank has built the store
    stores = open_stores(config.corpus, vocabulary, expanded(config.run) / "store")
    for rank in range(transport.rank + 1, transport.size):
        if first == transport.rank and transport.nodes[rank] == transport.nodes[first]:
            transport.send(rank, Tag.HELLO, Message())
    transport.send(0, Tag.HELLO, from_json(_identity(config, stores)))
    config = defaults.follow(config, transport, own, vocabulary, stores)
    make, auto = maker(config, own, vocabulary, stores), None
    if advisers is not None and config.mode == AUTO:
        auto = auto_mode.follow(config, transport, own, make, advisers(config, vocabulary, stores))
        config = auto.config
    config = defaults.follow_mode(config, transport)
    if auto is not None:
        auto.config = config
    return _rank(config, make, vocabulary, stores, auto, overwrite).train(transport)


def _say(what: str) -> None:
    tell(f"nmt-train: {what}")  # the log is not open yet


def _rank(config: Config, make: Make, vocabulary: Vocabulary, stores: Stores, auto: ChosenMode | None, overwrite: bool) -> Rank:
    take_over = partial(taken_over, config, vocabulary, stores, auto, overwrite)
    return Rank(config, make, handling, take_over)


def _compare_devices(config: Config, transport: Transport, own: torch.device) -> tuple[list[str], bool]:
    """Send the GPU of each rank to rank 0, which raises UserError if ranks share a GPU although `devices` does not say so.

    Returns, on rank 0, the type of device of every rank, and whether each has a GPU of its own.
    """
    mine = {"gpu": device.identity(own), "permitted": device.permitted(config.devices), "type": device.described(own)}
    said, by_gpu = gather(transport, mine), defaultdict[tuple[int, str], list[int]](list)
    for rank, facts in enumerate(said):
        by_gpu[transport.nodes[rank], str(facts["gpu"])].append(rank)
    for (_, gpu), ranks in by_gpu.items():
        if gpu and len(ranks) > min(int(said[rank]["permitted"]) for rank in ranks):
            raise UserError(
                f"devices: {describe(transport, *ranks)} compute on the same {gpu}; start at most one rank per GPU, let each"
                f" see its own (srun --gpus-per-task=1), or let them share it: devices: cuda x {len(ranks)}"
            )
        if gpu and len(ranks) > 1 and config.replicas.algorithm == "torch" and config.mode != AUTO:
            raise UserError(
                f"replicas.algorithm: torch (NCCL) needs one GPU per rank, but {describe(transport, *ranks)} share one;"
                " use ring, or give each rank its own GPU"
            )
    return [str(facts["type"]) for facts in said], "" not in {gpu for _, gpu in by_gpu} and len(by_gpu) == len(said) > 0


def _refuse_unequal(config: Config, transport: Transport, types: Sequence[str]) -> None:
    """Raise UserError if every rank updates its own copy of the parameters from gradients, but they would round differently."""
    plan = resolve(config, transport.nodes)
    if not plan.synchronous or plan.local_steps:
        return
    for rank, its in enumerate(types):
        if its != types[0]:
            raise UserError(
                f"devices: {describe(transport, rank)} computes on {its}, but rank 0 (host {transport.hosts[0]}) on {types[0]}:"
                f" in mode {config.mode}, each updates a copy of the parameters, and different devices or versions round"
                " differently; use equal ones, or a mode with a server or local steps, such as sparse-overlap or sparse-local"
            )


def _agree(config: Config, transport: Transport, vocabulary: Vocabulary, stores: Stores) -> None:
    """Send the vocabulary to the other ranks; UserError names the first rank whose code, configuration or corpus differs."""
    for rank in range(1, transport.size):
        transport.send(rank, Tag.HELLO, from_bytes(vocabulary.model))
    for rank in range(1, transport.size):
        if transport.nodes[rank] == transport.nodes[0]:
            transport.send(rank, Tag.HELLO, Message())  # the store on this machine is ready
    mine = _identity(config, stores)
    for rank in range(1, transport.size):
        theirs = to_facts(transport.receive(rank, Tag.HELLO).result()[1], "version")
        for what, value in mine.items():
            if value != theirs.get(what):
                differing = f"{theirs.get(what)} there, {value} on rank 0"
                raise UserError(
                    f"{describe(transport, rank)} disagrees with rank 0 (host {transport.hosts[0]}): {what}: {differing}; all"
                    " ranks need the same version, configuration and corpus"
                )


def _accept(config: Config, transport: Transport) -> Vocabulary:
    """Receive rank 0's vocabulary; UserError if this rank's `corpus.vocabulary.path` is another one."""
    vocabulary = Vocabulary.read(to_bytes(transport.receive(0, Tag.HELLO).result()[1]), "rank 0's vocabulary")
    path = config.corpus.vocabulary.path
    there = all(expanded(each).exists() for each in as_list(path)) if path else False
    if path and there and Vocabulary.load(path).digest != vocabulary.digest:
        raise UserError(
            f"corpus.vocabulary.path: {path} is not the vocabulary of rank 0 (host {transport.hosts[0]}); copy that one here"
        )
    return vocabulary


def _identity(config: Config, stores: Stores) -> dict[str, Any]:
    """Everything that must be equal on all ranks, in the order in which `_agree` compares it."""
    code = hashlib.sha256()
    folder = Path(nmt_train.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if not name.startswith("recipes/"):  # in a clone a link, which Python versions follow or not
            code.update(name.encode() + path.read_bytes())
    leaves = flatten(configuration.plain(config))
    same = {f"configuration key {name}": value for name, value in leaves.items() if not name.startswith(_LOCAL)}
    return {
        "version": nmt_train.__version__, "code (its checksum)": code.hexdigest()[:12], **same,
        "corpus.train (weight, until, tag and noise of each corpus)": [
            [str(part.weight), part.until and str(part.until), part.tag, part.noise and vars(part.noise)]
            for part in config.corpus.parts
        ],
        **{f"corpus.train ({what})": [one[what] for one in stores.identity] for what in ("pairs", "checksum")},
    }  # fmt: skip
