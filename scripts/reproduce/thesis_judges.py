"""Judges of the thesis's claims (Neckermann 2017, chapter 4): each says what the runs found, and which clauses hold.

docs/thesis.md says when limits were set and corrected. A number is confirmed within 10% ("about 40%": 1.26 to 1.54), "as fast
as" is 0.9 to 1.1, "slower" is below 0.9, "much worse" below 2/3, "barely" below 1.1, "practically nothing" below 1.1, "linear"
is within 5%, "more than linear" never falls and ends at least 1% higher, and "above" may be 0.1% below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from reproduce.claims import Clause, Judged, spread
from reproduce.runs import Setup
from reproduce.thesis import BASE, BOUND, CENTRAL, NEAR, ONCE, REMOTE, SPARSE, SPARSE_OVERLAP, Ratio, Results

_EXACT, _ALIKE, _SAME = 0.1, (0.9, 1.1), 0.999


def _about(times: float) -> tuple[float, float]:
    return times * (1 - _EXACT), times * (1 + _EXACT)


def _shown(ratios: dict[str, Ratio], than: str = "1x1") -> str:
    return f"speed relative to {than}: {', '.join(f'{name} {ratio}' for name, ratio in ratios.items())}"


def _speeds(values: Sequence[float], of: str) -> str:
    return f"{of}: {', '.join(f'{value:,.0f}' for value in values)}"


def _less_and_less(gains: Sequence[float]) -> bool:
    """Whether each gain is smaller than the one before, but still a gain."""
    return min(gains) > 0 and all(later < earlier for earlier, later in pairwise(gains))


def t1(found: Results) -> Judged:
    speeds = {devices: found.speed(Setup("single", f"1x{devices}")) for devices in (1, 2, 3, 4, 8)}
    gains = [1.0, *((speeds[b] - speeds[a]) / (b - a) / speeds[1] for a, b in pairwise(speeds))]
    text = f"8 devices: {speeds[8] / speeds[1]:.1f}x; relative to the first, the second, third, fourth and each later one add "
    text += ", ".join(f"{gain:.2f}" for gain in gains[1:])
    return text, [Clause("every further GPU adds less", _less_and_less(gains), fitted=True)]


def t2(found: Results) -> Judged:
    ratios = {n: found.faster("single", f"1x{n}") for n in (2, 4, 8)}
    speeds = {n: found.speed(Setup("single", f"1x{n}")) / found.speed(BASE) for n in ratios}
    text = "; ".join(f"1x{n}: words {speeds[n]:.1f}x, convergence {ratio}" for n, ratio in ratios.items())
    steps = {n: found.ratio(Setup("single", f"1x{n}"), Setup("single", f"1x{2 * n}")) for n in (2, 4)}
    text += "".join(f"; 1x{2 * n} relative to 1x{n}: {step}" for n, step in steps.items())
    clauses = [replace(found.clause(f"1x{2 * n} faster than 1x{n}", step, 1.0), fitted=n == 2) for n, step in steps.items()]
    # With the rate that is best for one device, 1x2 gains less, too (archive/thesis-earlier-versions.md).
    clauses += [
        replace(found.clause(f"1x{n} gains as much as in words/s", ratio, *_about(speeds[n])), fitted=True)
        for n, ratio in ratios.items()
    ]
    return text, clauses


def t3(found: Results) -> Judged:
    speeds = [found.per_node("vanilla", f"4x{n}") for n in (1, 2, 3, 4)]
    return _speeds(speeds, "words/s of a node with 1 to 4 devices"), [Clause("under 10% more", max(speeds) < 1.1 * speeds[0])]


def t4(found: Results) -> Judged:
    speeds = [found.speed(Setup("single", "1x2")), *(found.speed(Setup("vanilla", f"{n}x2")) for n in (2, 3, 4, 5))]
    gains = [b - a for a, b in pairwise(speeds[1:])]
    clauses = [Clause("2 nodes below 1", speeds[1] < speeds[0]), Clause("diminishing returns after", _less_and_less(gains))]
    return _speeds(speeds, "words/s of 1 to 5 nodes"), clauses


def t5(found: Results) -> Judged:
    ratios = {name: found.faster("vanilla", name) for name in ("2x1", "2x2", "4x1", "4x2")}
    beyond = found.ratio(Setup("vanilla", "2x2"), Setup("vanilla", "4x2"))
    share = found.per_node("vanilla", "4x1") / found.speed(BASE)
    text = f"{_shown(ratios)}; 4x2 relative to 2x2: {beyond}; a node of 4x1 processes {share:.2f} of 1x1's words/s"
    clauses = [found.clause(f"{name} slower", ratio, high=_ALIKE[0]) for name, ratio in ratios.items()]
    return text, [*clauses, found.clause("hardly any gain beyond 2x2", beyond, *_ALIKE)]


def t6(found: Results) -> Judged:
    share = found.share(Setup("overlap", "2x1"), "MainThread: forward", "MainThread: backward")
    return f"{share:.1%} in forward and backward", [Clause("over 99%", share > 0.99)]


def _scaling(found: Results, mode: str) -> Judged:
    devices = [found.per_node(mode, f"4x{n}") for n in (1, 2, 3, 4)]
    nodes = [found.speed(Setup("single", "1x2")), *(found.speed(Setup(mode, f"{n}x2")) / n for n in (2, 3, 4, 5))]
    text = (
        _speeds(devices, "words/s of a node with 1 to 4 devices") + "; " + _speeds(nodes, "words/s per node with 1 to 5 nodes")
    )
    linear = all(speed > 0.95 * n * devices[0] for n, speed in enumerate(devices, 1))
    superlinear = nodes == sorted(nodes) and nodes[-1] > 1.01 * nodes[0]
    clauses = [Clause("linear over devices", linear), Clause("more than linear over nodes", superlinear)]
    return text, clauses


def t7(found: Results) -> Judged:
    text, clauses = _scaling(found, "overlap")
    above = {n: found.per_node("overlap", f"4x{n}") > _SAME * found.speed(Setup("single", f"1x{n}")) for n in (1, 2, 3, 4)}
    return text, [*clauses, *(Clause(f"a node of {n} above the single node", its) for n, its in above.items())]


def t8(found: Results) -> Judged:
    ratios = {name: found.faster("overlap", name) for name in ("2x1", "2x2", "4x1")}
    than = {name: found.ratio(Setup("overlap", name), Setup("overlap", "2x1")) for name in ("2x2", "4x1")}
    text = f"{_shown(ratios)}; of 2x1, {_shown(than, 'the others')}"
    return text, [found.clause(f"2x1 faster than {name}", ratio, 1.0) for name, ratio in than.items()]


def t9(found: Results) -> Judged:
    gains = {name: found.ratio(Setup("overlap", name), Setup("overlap", name, BOUND)) for name in ("2x1", "2x2")}
    clauses = [found.clause("2x2 about 40%", gains["2x2"], *_about(1.4)), found.clause("2x1 faster", gains["2x1"], 1.0)]
    return _shown(gains, "no bound"), clauses


def t10(found: Results) -> Judged:
    its, dense = Setup(SPARSE, "2x1", REMOTE), Setup("vanilla", "2x1", REMOTE)
    other, same = (
        found.measure(its, f"timing seconds of an exchange with {where}") for where in ("another machine", "the same machine")
    )
    of = "timing bytes/word of the first rank"
    share = found.measure(its, of) / found.measure(dense, of)
    text = (
        f"an exchange with a shard takes {1000 * same:.0f} ms in the same machine and {1000 * other:.0f} ms in another,"
        f" {other / same:.2f} times as long; {share:.3%} of the bytes"
    )
    return text, [Clause("barely slower", other < 1.1 * same), Clause("about 0.02%", 0.00018 <= share <= 0.00022)]


def t11(found: Results) -> Judged:
    speeds = [found.speed(Setup(SPARSE, f"{n}x2")) / n for n in (2, 3, 4, 5)]
    clauses = [Clause("linear from 3 nodes on", all(speed > 0.95 * speeds[1] for speed in speeds[2:]))]
    return _speeds(speeds, "words/s per node with 2 to 5 nodes of two devices"), clauses


def t12(found: Results) -> Judged:
    ratios = {name: found.faster(SPARSE, name) for name in ("2x1", "3x1", "4x1")}
    four = found.faster(SPARSE, "4x1", than=Setup("single", "1x4"))
    clauses = [
        found.clause(f"{name} is {times:.2f}x", ratios[name], *_about(times))
        for name, times in (("2x1", 1.25), ("3x1", 1.8), ("4x1", 2.5))
    ]
    more = found.faster(SPARSE, "4x1", than=Setup(SPARSE, "3x1"))
    clauses += [
        found.clause("4x1 is as fast as 1x4", four, *_ALIKE),
        found.clause("4x1 is 1.40x as fast as 3x1", more, *_about(1.4)),
    ]
    return f"{_shown(ratios)}; 4x1 relative to 1x4: {four}, to 3x1: {more}", clauses


def t13(found: Results) -> Judged:
    ratios = {name: found.faster(SPARSE, name, than=Setup("single", "1x2")) for name in ("2x2", "3x2")}
    eight = found.faster(SPARSE, "4x2", than=Setup("single", "1x8"))
    clauses = [
        found.clause("2x2 slower", ratios["2x2"], high=_ALIKE[0]), found.clause("3x2 is 1.70x", ratios["3x2"], *_about(1.7)),
        found.clause("4x2 is as fast as 1x8", eight, *_ALIKE),
    ]  # fmt: skip
    alone = found.faster(SPARSE, "3x2")
    text = f"{_shown(ratios, '1x2')}; 4x2 relative to 1x8: {eight}; 3x2 relative to 1x1: {alone}"
    return text, _meaningful(clauses, found.clause("3x2 faster than 1x1, or the rest says nothing", alone, 1.0))


def t14(found: Results) -> Judged:
    return _scaling(found, SPARSE_OVERLAP)


def t15(found: Results) -> Judged:
    gains = {name: found.ratio(Setup(SPARSE, name), Setup(SPARSE_OVERLAP, name)) for name in ("3x1", "4x1", "3x2", "4x2")}
    clauses = [
        found.clause("3x1 little faster", gains["3x1"], 1.0, _ALIKE[1]), found.clause("4x1 as fast", gains["4x1"], *_ALIKE),
    ]  # fmt: skip
    clauses += [found.clause(f"{name} 30% faster", gains[name], *_about(1.3)) for name in ("3x2", "4x2")]
    alone = found.faster(SPARSE_OVERLAP, "4x1")
    text = f"{_shown(gains, 'no overlap')}; 4x1 relative to 1x1: {alone}"
    return text, _meaningful(clauses, found.clause("4x1 faster than 1x1, or the rest says nothing", alone, 1.0))


def t16(found: Results) -> Judged:
    ratios = {name: found.faster(SPARSE_OVERLAP, name) for name in ("3x1", "4x2", "7x1")}
    return _shown(ratios), [
        found.clause("7x1 is 5x", ratios["7x1"], *_about(5.0)), found.clause("3x1 is above 2x", ratios["3x1"], 2.0),
        found.clause("4x2 is about 4x", ratios["4x2"], *_about(4.0)),
    ]  # fmt: skip


def t17(found: Results) -> Judged:
    ratios = {name: found.faster("overlap", name) for name in ("2x1", "2x2", "4x1")}
    return _shown(ratios), [found.clause(f"{name} much worse", ratio, high=2 / 3) for name, ratio in ratios.items()]


def t18(found: Results) -> Judged:
    ratios = {name: found.ratio(Setup("vanilla", name), Setup("overlap", name)) for name in ("2x1", "2x2", "4x1")}
    return _shown(ratios, "vanilla"), [found.clause(f"{name} faster", its, _ALIKE[1]) for name, its in ratios.items()]


def t19(found: Results) -> Judged:
    without, both, alone = (
        found.faster(SPARSE_OVERLAP, "3x2", than=than) for than in (Setup(SPARSE, "4x2"), Setup(SPARSE_OVERLAP, "4x2"), BASE)
    )
    text = f"speed of 3x2 with overlap relative to 4x2 without: {without}, to 4x2 with overlap: {both}, to 1x1: {alone}"
    clauses = [found.clause(f"as fast as 4x2 {how}", its, *_ALIKE) for how, its in (("without", without), ("with it", both))]
    return text, _meaningful(clauses, found.clause("faster than 1x1, or the rest says nothing", alone, 1.0))


def _meaningful(clauses: Sequence[Clause], guard: Clause) -> list[Clause]:
    """The clauses of a claim about an order, and one that is not the thesis's: if it fails, the others do not count."""
    its = [replace(clause, fitted=True) for clause in clauses] if guard.holds is False else clauses
    return [*its, replace(guard, fitted=True)]


def t20(found: Results) -> Judged:
    speeds = [found.per_node(SPARSE, f"4x{n}") for n in (1, 2, 3, 4)]
    gains = [speeds[0], *(b - a for a, b in pairwise(speeds))]
    clauses = [
        Clause("every further GPU adds less", _less_and_less(gains)),
        Clause("sublinear", speeds[3] < 0.95 * 4 * speeds[0]),
    ]
    return _speeds(speeds, "words/s of a node with 1 to 4 devices"), clauses


def t21(found: Results) -> Judged:
    two, three = (found.speed(Setup(SPARSE, f"{n}x2")) / n for n in (2, 3))
    return _speeds([two, three], "words/s per node with 2 and 3 nodes"), [Clause("2 nodes slower", two < 0.95 * three)]


def t22(found: Results) -> Judged:
    ours = Setup(SPARSE_OVERLAP, ONCE.cluster)
    values = found.later(ours, ONCE)
    text = f"cross-entropy of {ONCE.cluster} after the same time, relative to that of SimuParallelSGD: {spread(values)}"
    once, alone = found.curve(ONCE)[-1], found.after(BASE, found.curve(ONCE)[-1]["seconds"], "seconds")
    text = f"{text}; that of SimuParallelSGD is {once['cross-entropy']:.3f}, that of 1x1 {alone:.3f}"
    gains = Clause("SimuParallelSGD is better than 1x1, or the rest says nothing", once["cross-entropy"] < alone)
    return text, [found.decide("lower", (ONCE, ours), values, NEAR, high=1.0), replace(gains, fitted=True)]


def t23(found: Results) -> Judged:
    nodes, alone = (
        [found.per_node(mode, name.format(n)) for n in (1, 2, 3, 4)] for mode, name in ((SPARSE, "4x{}"), ("single", "1x{}"))
    )
    text = _speeds(nodes, "words/s of a node with 1 to 4 devices") + "; " + _speeds(alone, "of a single node")
    pairs = enumerate(zip(nodes, alone, strict=True), 1)
    return text, [Clause(f"{n} device{'s' * (n > 1)}", node < its) for n, (node, its) in pairs]


def t24(found: Results) -> Judged:
    shares = [found.speed(Setup(SPARSE_OVERLAP, f"4x{n}")) / found.speed(Setup("overlap", f"4x{n}")) for n in (1, 2, 3, 4)]
    text = f"words/s relative to overlap, 1 to 4 devices per node: {', '.join(f'{share:.3f}' for share in shares)}"
    return text, [Clause("slightly below", all(0.9 < share < 1 for share in shares))]


def t25(found: Results) -> Judged:
    forward, backward, update = (found.share(BASE, f"MainThread: {name}") for name in ("forward", "backward", "update"))
    text = f"forward {forward:.1%} of the time, backward {backward:.1%}, update {update:.1%}"
    clauses = [Clause("backward longest", backward > max(forward, update)), Clause("update under 10%", update < 0.1)]
    return text, [replace(clause, fitted=True) for clause in clauses]  # the costs of forward, backward and update are assumed


def t26(found: Results) -> Judged:
    # Relative to the forward pass, which takes as long on any number of devices.
    sync, update = (
        found.share(Setup("single", cluster), f"MainThread: {name}")
        / found.share(Setup("single", cluster), "MainThread: forward")
        for cluster, name in (("1x4", "sync"), ("1x1", "update"))
    )
    text = f"relative to a forward pass: sync of four devices {sync:.2f}, update of one {update:.2f}"
    return text, [Clause("sync longer", sync > update)]


def t27(found: Results) -> Judged:
    its = Setup("vanilla", "2x1")
    sync, forward, backward = (found.share(its, f"MainThread: {name}") for name in ("sync", "forward", "backward"))
    exchange = found.share(its, "network in: receive gradients", "network out: send parameters")
    update = found.share(its, "server: update")
    text = f"client: sync {sync:.1%} of the time, forward {forward:.1%}, backward {backward:.1%}; "
    text += f"server: exchanging {exchange:.1%}, update {update:.1%}"
    clauses = [Clause("sync is the client's longest", sync > max(forward, backward))]
    return text, [*clauses, Clause("exchanging is the server's", exchange > update)]


def t28(found: Results) -> Judged:
    idle = 1 - found.share(Setup("overlap", "2x1"), "background task: sync")
    busy = {name: _serving(found, Setup("overlap", name)) for name in ("2x1", "3x1")}
    text = f"2x1: the communication thread waits for {idle:.1%} of the time for the next gradient; servers are busy for "
    text += ", ".join(f"{share:.1%} ({name})" for name, share in busy.items())
    return text, [Clause("10% or more of waiting", idle > 0.1), Clause("3x1 keeps servers busy (90%)", busy["3x1"] > 0.9)]


def _serving(found: Results, setup: Setup) -> float:
    return found.share(
        setup, "network in: receive gradients", "server: update", "server: encode", "network out: send parameters"
    )


def t29(found: Results) -> Judged:
    # As many of one kind as of the other: a worker of 2x1 syncs with one remote shard, a shard serves one remote worker.
    its = Setup(SPARSE_OVERLAP, "2x1")
    sync, update = found.share(its, "background task: sync"), found.share(its, "server: update", "server: encode")
    text = f"an exchange of the client takes {sync / update:.1f} times as long as an update of the server"
    return text, [Clause("client longer", sync > update)]


def t30(found: Results) -> Judged:
    speeds = {name: found.speed(Setup("vanilla", name, CENTRAL)) for name in ("2x1", "4x1", "7x1")}
    more = speeds["7x1"] / speeds["4x1"]
    return _speeds(list(speeds.values()), "words/s of 2, 4 and 7 nodes"), [Clause("7 nodes add under 10% to 4", more < 1.1)]


def t31(found: Results) -> Judged:
    sent = {
        name: found.measure(Setup("vanilla", name, REMOTE), "timing bytes/word of the first rank")
        for name in ("2x1", "4x1", "7x1")
    }
    text = "MB that a node sends per word, with 2, 4 and 7 nodes: " + ", ".join(f"{its / 1e6:.2f}" for its in sent.values())
    return text, [Clause("constant (within 5%)", max(sent.values()) < 1.05 * min(sent.values()))]
