"""The systems that scripts/tune compares, and the settings that it tries for each."""

from __future__ import annotations

import itertools
import operator
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from reproduce.places import FAST, MACHINES, SLOW, SLOWEST, THESIS_4X2, THESIS_7X1

ALONE, IDEAL = "one machine", "ideal sync"


@dataclass(frozen=True)
class System:
    """A mode with fixed options, and the settings to try; the first value of each is part of the first trial.

    plans: by place, settings to try that belong together: how often to exchange how much, joined by commas.
    last_plans: plans that refining tries with the best settings, in full runs, for systems without `plans`.
    unlimited: `fixed` gives the network. lockstep: workers wait for each other, so the network changes only times.
    singly: an update has the batch of one worker, not the batches of all. drains: the end of a run waits for a long exchange.
    """

    mode: str
    fixed: tuple[str, ...]
    knobs: Mapping[str, tuple[str, ...]]
    plans: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    last_plans: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unlimited: bool = False
    lockstep: bool = True
    singly: bool = False
    drains: bool = False

    @property
    def scales(self) -> bool:
        """Whether another network changes only the times of a run, all by the same factor."""
        return self.lockstep and not self.drains

    def variants(self, settings: tuple[str, ...], key: str, place: str = FAST) -> list[tuple[str, ...]]:
        """These settings with other values of `key`: of a plan or a floor, all; of others, the next lower and higher one."""
        value = dict(setting.split("=", 1) for setting in settings).get(key)
        if value is None:
            return []
        others = self.plans.get(place, ()) if key == "plan" else _FLOORS if key == "floor" else _neighbors(key, value)
        return [_with(settings, key, other) for other in others if other != value]

    def with_last_plans(self, settings: tuple[str, ...], place: str) -> list[tuple[str, ...]]:
        """These settings with each of `last_plans`, and with the parts of their own plan that it does not set."""
        plans = (plan_of(settings) | plan_of((f"plan={plan}",)) for plan in self.last_plans.get(place, ()))
        return [_with(settings, "plan", _joined(plan)) for plan in plans]

    def batches(self, settings: tuple[str, ...], tokens: int) -> list[tuple[str, ...]]:
        """These settings with half and twice the batch, and so with the rate divided or multiplied by the square root of 2.

        tokens: of a batch, if the plan has none. Local steps come both with the same plan, counted in steps, and with the same
        words between exchanges. An accumulated batch is tuned by its plans.
        """
        values = dict(setting.split("=", 1) for setting in settings)
        plan = plan_of(settings)
        if "batch.accumulate" in plan:
            return []
        found = []
        for factor in (0.5, 2.0):
            batch = int(float(plan.get("batch.tokens", tokens)) * factor)
            scaled = {key: float(plan[key]) / factor for key in ("local.every", "local.delay") if key in plan}
            same_words = {key: f"{steps:g}" for key, steps in scaled.items() if steps.is_integer()}
            with_rate = _with(settings, "rate", f"{float(values['rate']) * factor**0.5:.4g}")
            for steps in ({}, same_words) if len(same_words) == len(scaled) > 0 else ({},):
                found.append(_with(with_rate, "plan", _joined(plan | steps | {"batch.tokens": str(batch)})))
        return found

    def candidates(self, most: int, place: str = FAST) -> list[tuple[str, ...]]:
        """The settings of at most `most` trials: the first values of all knobs, then random choices, the same every time."""
        knobs = dict(self.knobs) | ({"plan": self.plans[place]} if place in self.plans else {})
        choices = list(itertools.product(*([f"{key}={value}" for value in values] for key, values in knobs.items())))
        rest = choices[1:]
        random.Random(1).shuffle(rest)
        return [choices[0], *rest[: most - 1]]


def _with(settings: tuple[str, ...], key: str, value: str) -> tuple[str, ...]:
    """Settings with another value of a key, which is the last one if it is new."""
    values = dict(setting.split("=", 1) for setting in settings) | {key: value}
    return tuple(f"{name}={its}" for name, its in values.items())


def plan_of(settings: Iterable[str]) -> dict[str, str]:
    """The parts of the plan among these settings."""
    plan = dict(setting.split("=", 1) for setting in settings).get("plan", "")
    return dict(part.split("=", 1) for part in plan.split(",") if part)


def _joined(plan: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in plan.items())


_FLOORS = ("1", "0.3", "0")
_BETA1 = ("0", "0.15", "0.3", "0.5", "0.7", "0.8", "0.9", "0.95")


def _knobs(rate: str, warmup: str, beta1: str = "0.9 0.8") -> dict[str, tuple[str, ...]]:
    """Values to try, separated by spaces."""
    values = {"rate": rate, "warmup": warmup, "beta1": beta1}
    return {key: tuple(text.split()) for key, text in values.items()} | {"floor": _FLOORS}


def _knobs_of_muon(rate: str, warmup: str, momenta: str = "0.95 0.9") -> dict[str, tuple[str, ...]]:
    """As `_knobs`, but with the momentum of matrices instead of beta1."""
    knobs = _knobs(rate, warmup)
    del knobs["beta1"]
    return knobs | {"optimizer.momentum": tuple(momenta.split())}


def _neighbors(key: str, value: str) -> tuple[str, ...]:
    """The next lower and the next higher value, also beyond those of the first search."""
    if key == "beta1":
        lower, higher = ([its for its in _BETA1 if compare(float(its), float(value))] for compare in (operator.lt, operator.gt))
        return (*lower[-1:], *higher[:1])
    factor = {"rate": 1.5, "warmup": 2.0}[key]
    return f"{float(value) / factor:.4g}", f"{float(value) * factor:.4g}"


def _plans(plans: Mapping[str, str], **names: str) -> dict[str, tuple[str, ...]]:
    """Plans by place, separated by spaces; the parts of a plan, separated by commas, may begin with short names."""
    for short, key in names.items():
        plans = {place: re.sub(rf"\b{short}=", f"{key}=", text) for place, text in plans.items()}
    return {place: tuple(text.split()) for place, text in plans.items()}


def _networks(fast: str, slow: str, slowest: str) -> dict[str, str]:
    return {FAST: fast, SLOW: slow, SLOWEST: slowest}


# Systems that make fewer updates from the same words are offered higher rates and warm-ups of fewer updates. Systems that add
# up the updates of all workers are offered lower beta1: asynchrony and late sending act as momentum (Mitliagkas et al. 2016).
_ONE_BATCH, _FOUR_BATCHES = ("0.003 0.002 0.005 0.008", "400 100 200 800"), ("0.006 0.003 0.009 0.012", "100 25 50 200")
_LOCAL = ("0.003 0.002 0.005 0.008", "100 25 50 200")
_PUSHES = ("0.003 0.002 0.005", "800 400 1600", "0.15 0 0.5")
_LOCAL_PUSHES = ("0.003 0.002 0.005", "200 100 400", "0.15 0 0.5")
_UNLIMITED = tuple(f"cluster.{part}.{key}" for part in ("network", "inside") for key in ("bandwidth=100 GB/s", "latency=0 us"))
# An exchange of 60M parameters in half precision takes 7 steps at 1 Gbit/s, and ten times as many at each slower network.
_DENSE_LOCAL = _plans(_networks("every=8,delay=8 every=8,delay=0 every=16,delay=8 every=32,delay=0",
                                "every=72,delay=72 every=72,delay=0 every=144,delay=72 every=36,delay=36",
                                "every=140,delay=140 every=140,delay=0 every=280,delay=280 every=280,delay=0"),
                      every="local.every", delay="local.delay")  # fmt: skip
_MUON = ("optimizer.name=muon", "optimizer.weight_decay=0")
# Many machines may need smaller batches. With 224 tokens instead of 448, a machine has 7% fewer words/s.
_BATCHES = dict.fromkeys(MACHINES.values(), ("batch.tokens=448", "batch.tokens=224", "batch.tokens=112"))
SYSTEMS: dict[str, System] = {
    ALONE: System("single", ("cluster.nodes=1 x 1",), _knobs(*_ONE_BATCH), _BATCHES, singly=True),
    f"{ALONE}, muon": System(
        "single", ("cluster.nodes=1 x 1", *_MUON), _knobs_of_muon(*_ONE_BATCH), _plans({FAST: "n=2 n=1"}, n="batch.accumulate"),
        singly=True
    ),
    IDEAL: System("sync", (*_UNLIMITED, "cluster.bus=100 GB/s"), _knobs(*_FOUR_BATCHES), _BATCHES, unlimited=True),
    "sync bf16": System(
        "sync", ("replicas.codec=bf16",), _knobs(*_FOUR_BATCHES),
        _plans(_networks("n=2 n=1 n=4 n=8", "n=8 n=4 n=16 n=32", "n=32 n=16 n=64 n=8"), n="batch.accumulate")
    ),
    "sync bf16, every step": System("sync", ("replicas.codec=bf16",), _knobs(*_FOUR_BATCHES)),
    "sync bf16, late lookups": System("sync", ("replicas.codec=bf16", "replicas.late_lookups=true"), _knobs(*_FOUR_BATCHES)),
    "pipe": System(
        "pipe", (), _knobs(*_FOUR_BATCHES) | {"pipeline.warmup": ("0", "25", "100")},
        dict.fromkeys((FAST, SLOW, SLOWEST), ("replicas.codec=half", "replicas.codec=int8"))
    ),
    "powersgd": System(
        "powersgd", ("replicas.codec=half",), _knobs(*_FOUR_BATCHES),
        _plans(_networks("rank=4,dense=0 rank=8,dense=0 rank=2,dense=0 rank=4,dense=50",
               "rank=1,dense=0 rank=2,dense=0 rank=1,n=2 rank=2,n=4",
               "rank=1,n=8 rank=1,n=16 rank=1,n=4 rank=2,n=16"),
               rank="low_rank.rank", dense="low_rank.dense_updates", n="batch.accumulate")
    ),
    "low-bit": System(
        "low-bit", (), _knobs(*_FOUR_BATCHES),
        _plans(_networks("up=2,down=3,late=true up=2,down=2,late=true up=3,down=3,late=true up=2,down=3,late=false",
                         "up=2,down=3,n=4 up=2,down=2,n=4 up=2,down=2,n=2 up=2,down=2,n=8",
                         "up=2,down=2,n=32 up=2,down=2,n=16 up=2,down=2,n=64 up=2,down=3,n=32"),
               up="low_bit.up", down="low_bit.down", late="replicas.late_lookups", n="batch.accumulate") | _BATCHES
    ),
    "low-bit, 4 bits": System("low-bit", ("low_bit.up=15", "low_bit.down=15"), _knobs(*_FOUR_BATCHES)),
    "low-bit, muon": System(
        "low-bit", (*_MUON, "low_bit.down=2"), _knobs_of_muon(*_FOUR_BATCHES),
        _plans({SLOW: "n=4 n=2 n=8", SLOWEST: "n=32 n=16 n=64"}, n="batch.accumulate")
    ),
    "local-sgd": System("local-sgd", ("replicas.codec=half",), _knobs(*_LOCAL), _DENSE_LOCAL, drains=True),
    "diloco": System(
        "diloco", ("local.outer_rate=1.0",), _knobs(*_LOCAL),
        {network: tuple(f"{plan},local.outer_momentum={momentum}" for plan in plans for momentum in (0.5, 0.9))
         for network, plans in _DENSE_LOCAL.items()},
        drains=True
    ),
    "diloco, muon": System(  # MuLoCo
        "diloco", ("local.outer_rate=1.0", *_MUON), _knobs_of_muon("0.003 0.005", "400 100"),
        _plans({SLOW: "every=144,delay=72,m=0.5 every=72,delay=72,m=0.5 every=36,delay=36,m=0.9"},
               every="local.every", delay="local.delay", m="local.outer_momentum"),
        drains=True
    ),
    "diloco-async": System(
        "diloco-async", ("local.outer_rate=1.0",), _knobs(*_LOCAL),
        _plans(_networks("every=8,delay=16,m=0.5 every=8,delay=16,m=0.9 every=16,delay=32,m=0.5 every=8,delay=0,m=0.5",
               "every=36,delay=144,m=0.5 every=72,delay=144,m=0.5 every=72,delay=144,m=0.9 every=72,delay=0,m=0.5",
               "every=140,delay=280,m=0.5 every=140,delay=280,m=0.9 every=280,delay=560,m=0.5 every=280,delay=0,m=0.5"),
               every="local.every", delay="local.delay", m="local.outer_momentum"),
        lockstep=False
    ),
    **{mode: System(mode, (), _knobs(*_PUSHES), lockstep=False, singly=True)
       for mode in ("vanilla", "thesis-sparse", "sparse", "sparse-overlap")},
    "strom": System(  # without a plan, 1% of the elements are sent, which takes many steps at 10 Mbit/s
        "strom", (), _knobs(*_PUSHES),
        _plans({SLOWEST: "share=0.001 share=0.002 share=0.0005 share=0.003,n=2"},
               share="threshold.density", n="batch.accumulate"),
        _plans({FAST: "share=0.003 share=0.03 share=0.1", SLOW: "share=0.003 share=0.02"}, share="threshold.density"),
        lockstep=False, singly=True
    ),
    # Four times a mean adds up what four workers send, as local.outer: sum does. On the thesis's cluster, 1% is sent.
    "sparse-local": System(
        "sparse-local", ("tiles.decay=1", "local.outer=none"), _knobs(*_LOCAL_PUSHES),
        _plans(_networks("every=1,delay=1,keep=300,rate=4 every=1,delay=1,keep=150,rate=4 every=1,delay=0,keep=150,rate=4"
               " every=2,delay=2,keep=600,rate=4",
               "every=1,delay=1,keep=34,rate=4 every=2,delay=2,keep=86,rate=4 every=4,delay=4,keep=180,rate=4"
               " every=2,delay=2,keep=86,rate=2",
               "every=8,delay=8,keep=28,rate=4 every=16,delay=16,keep=64,rate=4 every=16,delay=16,keep=64,rate=2"
               " every=32,delay=32,keep=135,rate=4") | {
               THESIS_4X2: "every=1,delay=1,keep=41,rate=8 every=1,delay=0,keep=41,rate=8 every=2,delay=2,keep=41,rate=8",
               THESIS_7X1: "every=1,delay=1,keep=41,rate=7 every=1,delay=0,keep=41,rate=7 every=2,delay=2,keep=41,rate=7",
               **{place: " ".join(f"every={every},delay={every},keep=86,rate={machines},batch={batch}"
                                  for every in (2, 1) for batch in (448, 224, 112))
                  for machines, place in MACHINES.items() if machines > 1}},
               every="local.every", delay="local.delay", keep="tiles.keep", rate="tiles.rate", batch="batch.tokens")
    ),
    "sparse-local, muon": System(
        "sparse-local", (*_MUON, "tiles.decay=1", "local.outer=none"),
        _knobs_of_muon("0.003 0.005 0.002", "200 100", "0.95 0.8 0.5"),
        _plans({SLOW: "every=1,delay=1,keep=34,rate=4 every=2,delay=2,keep=86,rate=4 every=2,delay=2,keep=86,rate=2",
                SLOWEST: "every=8,delay=8,keep=28,rate=4 every=16,delay=16,keep=64,rate=2"},
               every="local.every", delay="local.delay", keep="tiles.keep", rate="tiles.rate")
    ),
    "sparse-local 99.9%": System(
        "sparse-local", ("tiles.decay=1", "tiles.keep=4"), _knobs(*_LOCAL_PUSHES),
        dict.fromkeys((THESIS_4X2, THESIS_7X1), ("local.every=1,local.delay=1", "local.every=2,local.delay=2"))
    ),
    "sparse-overlap 99.9%": System(
        "sparse-overlap", ("dropping.up=0.999",), _knobs(*_PUSHES),
        dict.fromkeys((THESIS_4X2, THESIS_7X1), ("dropping.flush=null", "dropping.flush=100", "dropping.flush=200")),
        lockstep=False, singly=True
    ),
    "sparse-local-async, tiles": System(
        "sparse-local-async", ("server.up=tile-top-k", "server.down=tile-top-k", "tiles.size=32768", "local.delay=16"),
        _knobs(*_LOCAL_PUSHES),
        _plans(_networks("every=1,keep=2400 every=1,keep=1200 every=2,keep=2400 every=1,keep=4800",
                         "every=1,keep=660 every=2,keep=1320 every=1,keep=330 every=4,keep=2640",
                         "every=4,keep=270 every=8,keep=540 every=2,keep=135 every=16,keep=1080"),
               every="local.every", keep="tiles.keep"),
        lockstep=False
    ),
    "sparse-local-async": System(
        "sparse-local-async", (), _knobs(*_LOCAL_PUSHES),
        _plans(_networks("every=1,up=0.97 every=1,up=0.99 every=2,up=0.97 every=1,up=0.94",
               "every=1,up=0.99 every=1,up=0.995 every=1,up=0.98 every=4,up=0.98",
               "every=1,up=0.99 every=1,up=0.997 every=8,up=0.997 every=16,up=0.99"),
               every="local.every", up="dropping.up"),
        lockstep=False
    ),
}  # fmt: skip
