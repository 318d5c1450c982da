"""The simulated runs that test claims of five papers: Pipe-SGD (Li et al. 2018), Strom 2015, Farrell and Yang 2016, Arnold
2016, and Noel and Osindero 2014.
"""

from __future__ import annotations

import math
from pathlib import Path

from nmt_train.codec import CODECS as ALL_CODECS
from nmt_train.simulation import cluster_file
from reproduce.pipe_sgd_equations import Symbols, symbols
from reproduce.runs import Setup

WORDS = 2e6  # target words of every training run
CLUSTERS = Path(__file__).resolve().parents[2] / "configs" / "clusters"
STEPS = 400  # of every rank in a timing: with 40, words/s of the thesis's clusters differed by up to 5% from those of training


def together(batches: int) -> tuple[str, ...]:
    """Warm-up and learning rate for updates of `batches` batches: the same words of warm-up, a rate times sqrt(batches)."""
    return f"optimizer.warmup={400 // batches}", f"optimizer.learning_rate={0.003 * math.sqrt(batches):.4g}"


# Pipe-SGD. A dense exchange on its cluster takes 0.29 s; some of the batch times are shorter than that, some longer.
BATCHES = (0.03, 0.06, 0.12, 0.24, 0.27, 0.48)  # seconds of forward and backward
CODECS = ("truncated", "int8")


def at_batch(seconds: float, mode: str, *options: str) -> Setup:
    forward, backward = f"{seconds / 3 * 1e3:.0f}ms", f"{seconds / 1.5 * 1e3:.0f}ms"
    times = (f"cluster.device.forward.seconds={forward}", f"cluster.device.backward.seconds={backward}")
    return Setup(mode, "pipesgd", (*times, *options))


def predicted(codec: str) -> Symbols:
    """Pipe-SGD's symbols for its cluster and a codec; `l_comm` is the exchange of Eq. 5, `l_up` the update."""
    described = cluster_file.load(CLUSTERS / "pipesgd.yml")
    assert described.scale is not None
    return symbols(described, round(described.scale.parameters), ALL_CODECS[codec](), 0)


def all_reduce(seconds: float) -> Setup:
    return at_batch(seconds, "sync", "replicas.buckets=1")  # as in the paper: the exchange begins after the backward pass


def alone(seconds: float) -> Setup:
    return at_batch(seconds, "single", "cluster.nodes=1 x 1")


def pipe(seconds: float, codec: str) -> Setup:
    return at_batch(seconds, "pipe", f"replicas.codec={codec}")


def by_server(seconds: float) -> Setup:
    return at_batch(seconds, "vanilla", "server.rule=rounds", "server.shards=1", "server.bypass=none")


WIDTHS = (2, 3, 5, 9)


def of_width(width: int) -> Setup:
    return Setup("pipe", "pipesgd", ("replicas.codec=truncated", f"pipeline.width={width}", *together(4)))


SYNC = Setup("sync", "pipesgd", together(4))
WARMED = {codec: Setup("pipe", "pipesgd", (f"replicas.codec={codec}", "pipeline.warmup=100", *together(4))) for codec in CODECS}

# Strom 2015
SPEEDS = {1: 1.0, 5: 4.3, 10: 8.7, 20: 17.0, 40: 33.0, 80: 54.0}  # nodes: relative speed (Table 2)
DENSITY = 1 / 846  # fraction of elements sent at the paper's threshold of 4 (Table 3)
_STROMS_WORDS = ("threshold.coding=words",)  # 32 bits per element, without entropy coding, as in the paper's tables
TAUS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def strom_nodes(nodes: int) -> Setup:
    if nodes == 1:
        return Setup("single", "strom", ("cluster.nodes=1 x 1",))
    return Setup("strom", "strom", (f"cluster.nodes={nodes} x 1", f"threshold.density={DENSITY:.6f}", *_STROMS_WORDS))


def strom_tau(tau: float) -> Setup:
    return Setup("strom", "strom", (f"threshold.tau={tau}", *_STROMS_WORDS))


def strom_coding(coding: str) -> Setup:
    return Setup("strom", "strom", (f"threshold.density={DENSITY:.6f}", f"threshold.coding={coding}"))


# What might explain that five workers learn less than one. The paper's recipe (section 3.3) begins with smaller batches, and
# halves the rate after each epoch; here, four times in all, or once: there are about 3,500 updates, and 1,170 of warm-up.
STROM_VARIANTS = {
    name: Setup("strom", "strom", (*strom_coding("words").options, *options))
    for name, options in {
        "own updates applied at once": ("peers.own_updates=true",),
        "half of the rate": ("optimizer.learning_rate=0.0015",),
        **{
            f"one worker first, the rate halved every {every} updates": (
                "peers.join={1: 0u, 5: 400u}", "optimizer.schedule=step", f"optimizer.step_every={every}",
            )
            for every in (470, 1200)
        },
    }.items()
}  # fmt: skip
STROMS = (*map(strom_tau, TAUS), strom_coding("words"))
STROM_ALONE = strom_nodes(1)

# Farrell and Yang 2016
WORKERS = (1, 2, 4, 8, 16)


def downpour(
    workers: int, optimizer: str = "adagrad", rate: float | None = None, warmup: int = 0, join: tuple[str, ...] = ()
) -> Setup:
    rate = rate or {"adagrad": 0.02, "sgd": 0.5}[optimizer]
    options = (
        f"cluster.nodes={workers} x 1", f"optimizer.name={optimizer}", f"optimizer.learning_rate={rate}",
        "optimizer.schedule=constant", f"optimizer.warmup={warmup}", "validation.every=20Kt",  # two workers are compared early
    )  # fmt: skip
    return Setup("downpour", "downpour", (*options, *join))


# The rate was chosen with two workers, and the paper has no warm-up; both may be worse for many. Its outlook proposes that
# workers join in waves.
COMPARED = (2, 8, 16)
WAVES = {
    8: ("server.join={1: 0u, 2: 100u, 4: 200u, 8: 400u}",),
    16: ("server.join={1: 0u, 2: 100u, 4: 200u, 8: 400u, 16: 800u}",),
}
DOWNPOUR_VARIANTS = {
    "rate 0.007": {workers: downpour(workers, rate=0.007) for workers in COMPARED},
    "a warm-up": {workers: downpour(workers, warmup=400) for workers in COMPARED},
    "in waves": {workers: downpour(workers, join=join) for workers, join in WAVES.items()},
}


# Arnold 2016: eight workers whose speeds differ; each rule has the best of several learning rates, and Adam as configured.
_AS_CONFIGURED = ("optimizer.async_beta1=unchanged", "optimizer.async_warmup=unchanged")


def _tuned(mode: str, rate: float, *options: str, lowest: float = 0.25) -> dict[str, Setup]:
    """By rate: from `lowest` times `rate` to four times, each twice the one before."""
    rates = (f"{rate * 2.0**power:.4g}" for power in range(round(math.log2(lowest)), 3))
    return {its: Setup(mode, "arnold", (*options, f"optimizer.learning_rate={its}")) for its in rates}


TUNED: dict[str, dict[str, Setup]] = {
    "sync": _tuned("sync", 0.003 * math.sqrt(8), together(8)[0]),
    "asynchronous": _tuned("vanilla", 0.003, *_AS_CONFIGURED, lowest=1 / 16),
    "staleness-aware": _tuned("staleness-aware", 0.003 * math.sqrt(8), *_AS_CONFIGURED),
}
# With equal speeds, all gradients are about as stale, so that dividing by staleness is another rate. And dividing may matter
# less with a low beta1. Both have about the best rates of the rules above; those with a low beta1 are twice as high.
_RATES = {"asynchronous": ("vanilla", 0.00075), "staleness-aware": ("staleness-aware", 0.004243)}
RULES: dict[str, dict[str, Setup]] = {
    name: {
        rule: Setup(mode, "arnold", (*options, f"optimizer.learning_rate={times * rate:.4g}"))
        for rule, (mode, rate) in _RATES.items()
    }
    for name, times, options in (
        ("one worker at a quarter of the speed", 1, ("cluster.stragglers=[{rank: 7, factor: 4}]", *_AS_CONFIGURED)),
        ("a low beta1", 2, _AS_CONFIGURED[1:]),
    )
}
TOGETHER, AWARE = (TUNED[rule][f"{0.003 * math.sqrt(8):.4g}"] for rule in ("sync", "staleness-aware"))
BUNDLES = (2, 4, 8)


def softsync(bundle: int) -> Setup:
    """n-softsync divides by staleness, too (Zhang et al. 2016), so every n has the rate of n = 1 (AWARE)."""
    warmup, rate = together(bundle)[0], together(8)[1]
    return Setup("staleness-aware", "arnold", (f"server.bundle={bundle}", warmup, rate, *_AS_CONFIGURED))


# Noel and Osindero 2014, as the thesis describes it: workers push the sum of their gradients since the last exchange, and
# lost ones are not sent again. On the cluster of Pipe-SGD.
LOSSES = (0.0, 0.01, 0.1, 0.3)
SENT_AGAIN = Setup("overlap", "pipesgd", ("cluster.loss=0.1",))


def losing(share: float) -> Setup:
    return Setup("overlap", "pipesgd", (f"cluster.loss={share}", "cluster.resend=null"))


TIMED: tuple[Setup, ...] = (
    *(setup(seconds) for seconds in BATCHES for setup in (alone, all_reduce, by_server)),
    *(pipe(seconds, codec) for seconds in BATCHES for codec in CODECS),
    *(strom_nodes(nodes) for nodes in SPEEDS),
)  # fmt: skip
TRAINED: tuple[Setup, ...] = (
    SYNC, *(of_width(width) for width in WIDTHS), *WARMED.values(),
    STROM_ALONE, *STROMS, *STROM_VARIANTS.values(), strom_coding("golomb-rice"),
    *(downpour(workers) for workers in WORKERS), *(downpour(workers, "sgd") for workers in (2, 8)),
    *(losing(share) for share in LOSSES), SENT_AGAIN,
    *(setup for rates in TUNED.values() for setup in rates.values()), *(softsync(bundle) for bundle in BUNDLES),
    *(setup for its in DOWNPOUR_VARIANTS.values() for setup in its.values()),
    *(setup for its in RULES.values() for setup in its.values()),
)  # fmt: skip
