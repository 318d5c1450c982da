"""On which device everything is: who takes which GPU, and what of a GPU leaves it. Where none is, one is pretended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pretend
import pytest
import torch
from conftest import Make
from memory import MemoryTransport, together, transports

from nmt_train import device
from nmt_train.codec.low_bit import LowBit
from nmt_train.common.errors import UserError
from nmt_train.common.message import Message
from nmt_train.config import Config
from nmt_train.corpus.data_shard import DataShard, Position
from nmt_train.launch.restarts import Host
from nmt_train.modes.table import MODES
from nmt_train.training import start
from nmt_train.training.recovery import SurvivorState, recover
from nmt_train.training.snapshot import Snapshot, contributed
from nmt_train.training.worker import Worker
from nmt_train.transport import Aborted, Tag
from nmt_train.transport.local import LocalTransport

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """GPUs that torch seems to see, by what identifies them; a test may change the list."""
    visible = ["a", "b"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(visible))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "set_device", lambda own: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda own: SimpleNamespace(uuid=visible[own.index]))
    return visible


def refused(config: Config, nodes: list[int], identities: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What rank 0 says of ranks that compute on these GPUs; nothing if they may train."""
    monkeypatch.setattr(device, "identity", lambda own: own)
    monkeypatch.setattr(device, "described", lambda own: "a GPU")
    made = transports(nodes)
    steps = [lambda w=w, its=its: start._compare_devices(config, w, its) for w, its in zip(made, identities, strict=True)]
    try:
        together(*steps)
    except UserError as error:
        return str(error)
    return ""


def test_ranks_use_no_more_threads_and_memory_than_their_container_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    before, set_to = torch.get_num_threads(), list[int]()
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    for cores, ranks in ((float("inf"), 1), (2.5, 1), (2.5, 2), (0.5, 4), (float("inf"), 4)):
        monkeypatch.setattr("nmt_train.common.container.cores", lambda cores=cores: cores)
        device.prepare("cpu", 0, nodes=(0,) * ranks)
    assert set_to == [3, 2, 1, 16], "one rank without a limit leaves the choice to torch"
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))  # of a job of Slurm, or of a rank bound to them
    for unbound, threads in ((False, 8), (True, 2)):
        if unbound:
            monkeypatch.setenv("NMT_TRAIN_UNBOUND", "1")
        device.prepare("cpu", 0, nodes=(0,) * 4)
        assert set_to.pop() == threads
    device.prepare("cpu", 7)
    assert set_to[-1] == 7
    monkeypatch.setattr("nmt_train.common.container.memory", lambda: 1000.0)
    assert device.memory(torch.device("cpu"), "cpu", 2) == 500
    assert torch.get_num_threads() == before


def test_ranks_that_see_one_gpu_each_take_it_and_may_train_where_these_are_different(
    make: Make, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus[:] = ["a"]
    assert [device.prepare("all", 1, nodes=(0, 0, 0), rank=rank) for rank in range(3)] == [GPU] * 3
    assert refused(make(), [0, 0, 0, 1], ["GPU a", "GPU b", "GPU c", "GPU a"], monkeypatch) == ""


def test_ranks_on_one_gpu_are_refused_by_name(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(make(), [0, 1, 1], ["GPU a", "GPU b", "GPU b"], monkeypatch)
    assert said.startswith("devices: rank 1 (host host1) and rank 2 (host host1) compute on the same GPU b; start at most one")
    assert said.endswith("devices: cuda x 2")


@pytest.mark.parametrize(
    ("mode", "wrong"), [("sync", True), ("low-bit", True), ("sparse-overlap", False), ("local-sgd", False)]
)
def test_ranks_that_each_update_a_copy_by_gradients_need_equal_devices(make: Make, mode: str, wrong: bool) -> None:
    equal, first = ["H100", "H100"], transports([0, 1])[0]
    start._refuse_unequal(make(mode=mode), first, equal)
    said = r"rank 1 \(host host1\) computes on a CPU \(x86_64\), but rank 0 \(host host0\) on H100: in mode .*; use equal"
    with pytest.raises(UserError, match=said) if wrong else nullcontext():
        start._refuse_unequal(make(mode=mode), first, ["H100", "a CPU (x86_64)"])


def test_ranks_may_share_a_gpu_where_devices_says_how_many(
    make: Make, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device.choose("cuda x 3") == [GPU] * 3
    assert refused(make(devices="cuda x 3"), [0, 0, 0], ["GPU a"] * 3, monkeypatch) == ""
    assert "rank 2 (host host0) compute on the same GPU" in refused(
        make(devices="cuda x 2"), [0, 0, 0], ["GPU a"] * 3, monkeypatch
    )


@pytest.mark.parametrize("devices", ["1", "[1]", "[ 1 ]", [1]])
def test_a_gpu_is_named_by_its_number_also_on_the_command_line(devices: str | list[int], gpus: list[str]) -> None:
    assert device.choose(devices) == [torch.device("cuda", 1)]


def test_nccl_is_refused_between_ranks_on_one_gpu(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(devices="cuda x 2", replicas__algorithm="torch")
    assert "torch (NCCL) needs one GPU per rank" in refused(config, [0, 0], ["GPU a"] * 2, monkeypatch)


@pytest.mark.parametrize(
    ("nodes", "identities", "each"),
    [
        ([0, 0], ["GPU a", "GPU b"], True), ([0, 1], ["GPU a", "GPU a"], True), ([0, 0], ["GPU a", "GPU a"], False),
        ([0, 0], ["GPU a", ""], False), ([0, 0], ["", ""], False),
    ],
)  # fmt: skip
def test_rank_0_knows_whether_every_rank_has_a_gpu_of_its_own(
    make: Make, monkeypatch: pytest.MonkeyPatch, nodes: list[int], identities: list[str], each: bool
) -> None:
    monkeypatch.setattr(device, "identity", lambda own: own)
    monkeypatch.setattr(device, "described", lambda own: "a GPU")
    config, both = make(devices="cuda x 2"), zip(transports(nodes), identities, strict=True)
    found = together(*[lambda w=w, its=its: start._compare_devices(config, w, its) for w, its in both])
    assert found[0][1] == each


def test_ranks_on_cpus_share_as_they_like(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(make(), [0, 0], ["", ""], monkeypatch) == ""


def test_ranks_that_see_all_gpus_of_their_machine_take_one_each(gpus: list[str]) -> None:
    assert [device.prepare("all", 1, nodes=(0, 1, 1), rank=rank).index for rank in range(3)] == [0, 0, 1]


def test_a_gpu_is_known_by_its_own_name_whatever_number_it_has(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.identity(torch.device("cuda", 1)) == "GPU b"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda own: SimpleNamespace())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert device.identity(torch.device("cuda", 1)) == "GPU 7"
    assert device.identity(torch.device("cpu")) == ""


@pytest.mark.parametrize("devices", ["all", "cuda", "cuda x 2", [0, 1]])
def test_a_machine_that_only_starts_ranks_elsewhere_needs_no_gpu(make: Make, devices: Any) -> None:
    config = make(devices=devices, mode="vanilla")
    assert start.check(config, [Host("there", 2)]) == []
    with pytest.raises(UserError, match=r"torch finds none on this machine \(host \S+\)"):
        start.check(config)


@pytest.mark.parametrize(
    ("precision", "supported", "warned"), [("bf16", False, True), ("bf16", True, False), ("fp32", False, False)]
)
def test_a_cpu_without_instructions_for_the_precision_is_warned_of(
    make: Make, monkeypatch: pytest.MonkeyPatch, precision: str, supported: bool, warned: bool
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    config = make(precision=precision, stop__after="1u")
    assert start.start(config, force=False, overwrite=False) == 0
    log = (Path(config.run) / "train.log").read_text(encoding="utf-8")
    assert ("has no instructions for bf16" in log) == warned


def test_what_no_machine_understands_is_refused_where_the_job_is_started(make: Make) -> None:
    with pytest.raises(UserError, match="devices: 'gpu' is unknown"):
        start.check(make(devices="gpu", mode="vanilla"), [Host("there", 2)])


def test_tasks_of_a_rank_begin_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda own: entered.append((threading.current_thread().name, own)))
    LocalTransport().spawn("server", lambda: None).result()
    assert entered == [("server", 3)]


def test_spans_wait_for_the_gpu_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", settled.append)
    wait = device.settle(torch.device("cuda", 1))
    assert wait is not None
    wait()
    assert settled == [torch.device("cuda", 1)]
    assert device.settle(torch.device("cpu")) is None


@pytest.mark.slow
def test_tasks_have_ended_before_a_rank_goes_on_after_a_failure() -> None:
    transport = LocalTransport()
    tasks = [
        transport.spawn("background task", transport.event().wait),
        transport.spawn("server", lambda: transport.receive(None, Tag.PUSH).result()),
    ]
    transport.fail(Aborted("another rank failed"))
    transport.until_tasks_end(60.0)
    assert all(task.done() for task in tasks)


class Model(torch.nn.Module):
    def __init__(self, own: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        made = (torch.randn(shape, generator=generator).to(own) for shape in ((12, 50), (12,)))
        self.matrix, self.bias = (torch.nn.Parameter(tensor) for tensor in made)


class Nothing:
    def stream(self, data_shard: DataShard, position: Position) -> Iterator[Any]:
        return iter(())

    def epochs(self, length: Any) -> float:
        return float("inf")

    def described(self, batch: Any) -> str:
        raise AssertionError("all gradients are finite")


def over_the_network(transport: MemoryTransport, to: int, tag: Tag, message: Message) -> Any:
    """What is sent arrives on the CPU."""
    return carry(transport, to, tag, Message(message.numbers, tuple(tensor.cpu() for tensor in message.tensors)))


carry = MemoryTransport._carry


@pytest.fixture(params=["pretended", pytest.param("real", marks=pytest.mark.gpu)])
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setattr(MemoryTransport, "_carry", over_the_network)
    if request.param == "real":
        yield GPU
        return
    monkeypatch.setattr(device, "inherit", lambda: pretend.enter)
    monkeypatch.setattr(device, "random", lambda own: {"cpu": torch.get_rng_state()})
    monkeypatch.setattr("nmt_train.replicas.low_bit.low_bit_for", lambda own: LowBit)
    with pretend.gpu():
        yield GPU


def on_it(function: Callable[[], Any], own: torch.device) -> Callable[[], Any]:
    """The same for another thread."""

    def run() -> Any:
        device.inherit()()
        return function()

    return run


def train(worker: Worker, seed: int) -> None:
    """A few steps by gradients that nobody has computed, until nothing is under way."""
    worker.has_part = True
    worker.strategy.refresh()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        worker.flat.gradient.copy_(torch.randn(worker.flat.gradient.shape, generator=generator))
        worker.strategy.step()
    worker.strategy.drain()


def on_the_cpu(*groups: dict[str, torch.Tensor]) -> bool:
    return not any(tensor.is_cuda for group in groups for tensor in group.values())


def settings(make: Make, mode: str) -> Config:
    return make(mode=mode, optimizer__smoothing=0.1, stop__after="9e")


def workers(config: Config, own: torch.device, size: int) -> list[Worker]:
    made = transports(range(size)) if size > 1 else [LocalTransport()]
    found = [Worker(config, transport, Model(own), Nothing()) for transport in made]  # type: ignore[arg-type]
    together(*(on_it(lambda w=w: train(w, w.transport.rank), own) for w in found))
    together(*(on_it(w.strategy.refresh, own) for w in found))
    return found


@pytest.mark.parametrize("mode", sorted(MODES))
def test_what_ranks_on_gpus_save_is_on_the_cpu_and_they_go_on_from_it(make: Make, own: torch.device, mode: str) -> None:
    config = settings(make, mode)
    trained = workers(config, own, 1 if mode == "single" else 2)
    strategy, parts = trained[0].strategy, [worker.part() for worker in trained]
    assert all(on_the_cpu(part.shard, part.worker_state.vectors(), part.random) for part in parts)
    vectors = {name: torch.zeros(trained[0].flat.parameters.numel()) for name in parts[0].shard}
    for part, place in zip(parts, contributed(strategy.slices), strict=True):
        for name, vector in part.shard.items():
            vectors[name][place] = vector
    state, random, positions = ([getattr(p, kind) for p in parts] for kind in ("worker_state", "random", "position"))
    whole = Snapshot(vectors, parts[0].numbers, state, random, [positions])
    cut = whole.with_optimizer_at(strategy.optimizer.adds_updates).split(strategy.slices)
    before = [worker.flat.parameters.cpu().clone() for worker in trained]
    for worker, part in zip(trained, cut, strict=True):
        worker.load_part(part, DataShard(worker.transport.rank, worker.transport.size), "here")
    together(*(on_it(worker.strategy.refresh, own) for worker in trained))
    for worker, parameters in zip(trained, before, strict=True):
        assert torch.equal(worker.flat.parameters.cpu(), parameters)
        worker.transport.close()


@pytest.mark.parametrize("mode", sorted(set(MODES) - {"single"}))
def test_the_last_rank_on_a_gpu_goes_on_alone_from_what_it_had_and_what_others_sent(
    make: Make, own: torch.device, mode: str
) -> None:
    config = settings(make, mode)
    trained = workers(config, own, 2)
    remains = SurvivorState.of(trained[0], [0, 0])
    progress = {"tokens": 0, "updates": 0}
    remains.leader = {
        "generation": 0, "progress": progress, "positions": [[0, 0]] * 2, "ahead": {}, "stages": [], "assignments": 1,
        "updates": 0,
    }  # fmt: skip
    for worker in trained:
        worker.transport.close()
    remains.let_go()
    assert on_the_cpu(remains.worker_state.vectors(), remains.random, *(piece.vectors for piece in remains.recovery_pieces))
    alone = Worker(config, LocalTransport(), Model(own), Nothing())  # type: ignore[arg-type]
    again = recover(alone, remains)
    assert again is not None
    assert on_the_cpu(again.part.shard, again.part.worker_state.vectors())
    if mode in ("low-bit", "powersgd"):  # of a mean of two, a residual added half of itself
        torch.testing.assert_close(again.part.worker_state.residual, remains.in_doubt.residual / 2)
    alone.load_part(again.part, again.data_shard, "here")
    train(alone, 5)
    assert torch.isfinite(alone.flat.parameters).all()


@pytest.mark.parametrize("what", ["processor", "version"])
def test_cpus_of_another_type_or_with_another_torch_are_told_apart(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    own = device.described(torch.device("cpu"))
    if what == "processor":
        monkeypatch.setattr(device, "processor", lambda: "another")
    else:
        monkeypatch.setattr(torch, "__version__", "1.2.3")
    assert device.described(torch.device("cpu")) != own
