"""The thesis's claims (Neckermann 2017, chapter 4), each with its judge, and with the reason of the verdict."""

from __future__ import annotations

from reproduce import thesis_judges as judges
from reproduce.claims import Claim
from reproduce.thesis import Results

DENSE: tuple[Claim[Results], ...] = (
    Claim("T25", "4.1", "one device: backward takes longest, the update a small fraction", judges.t25,
          fitted="all costs of one device"),
    Claim("T26", "4.2", "four devices of one node: sync takes longer than the update of one", judges.t26),
    Claim("T1", "4.3a", "one node: every further GPU adds less; 8 give 4.3x one", judges.t1,
          fitted="4.3x, and so what further devices add (the bus)"),
    Claim("T2", "4.3b", "one node: convergence speeds up as much as words/s", judges.t2,
          fitted="more devices are faster at all, and how much 1x2 gains (the learning rate)"),
    Claim("T30", "3.2", "a central server does not scale", judges.t30),
    Claim("T31", "3.3", "sharded server: communication per node is constant", judges.t31),
    Claim("T27", "4.4", "vanilla 2x1: syncing is a client's most expensive task, exchanging a server's", judges.t27),
    Claim("T3", "4.5a", "vanilla, 4 nodes: more GPUs per node add practically nothing", judges.t3,
          "a third and a fourth device add nothing, but a second does"),
    Claim("T4", "4.5b", "vanilla, dual-GPU nodes: 2 nodes process fewer words/s than 1; diminishing returns after", judges.t4,
          "words/s per node fall, but those of all nodes do not grow by less and less"),
    Claim("T5", "4.6", "vanilla: 1x1 converges significantly faster than 2x1, 2x2, 4x1 and 4x2; hardly any gain beyond 2x2; a"
          " node of 4x1 runs at a third of 1x1", judges.t5, fitted="a third (the time of a batch)"),
    Claim("T6", "4.7", "overlap: over 99% of the compute thread's time in forward and backward", judges.t6,
          "another thread exchanges; adding up gradients is assumed to take no time"),
    Claim("T28", "4.7", "overlap: the communication thread waits considerably; 3 nodes keep servers busy", judges.t28),
    Claim("T7", "4.8", "overlap: near-linear words/s over GPUs, more than linear over nodes, each node above a single node",
          judges.t7, "a node of several has 14% more words/s than a single node, further nodes add 0.5%"),
    Claim("T8", "4.9", "overlap: 2x1 converges faster than 2x2 and 4x1", judges.t8),
    Claim("T9", "4.10", "overlap, at most 2 steps between exchanges: 2x2 converges nearly 40% faster, 2x1 is faster, too",
          judges.t9, "without a bound, an exchange takes only 2.4 steps here, so a bound of 2 changes little"),
    Claim("T17", "4.2.3, 5.1", "overlap is much worse than a single node", judges.t17,
          "two workers lose no more than they gain; four lose more"),
    Claim("T18", "4.2.3", "overlap converges significantly faster than vanilla", judges.t18,
          "gradients of four workers are 7 updates old (vanilla: 3), so each word teaches less"),
)  # fmt: skip
SPARSE: tuple[Claim[Results], ...] = (
    Claim("T10", "4.11", "sparse: remote exchanges barely slower than local ones; 0.02% of the bytes", judges.t10,
          "a thousandth of the elements at 8 bytes instead of 4 is 0.2%, not 0.02%"),
    Claim("T20", "4.12a", "sparse: words/s sublinear in the GPUs of a node", judges.t20,
          "the codec's assumed cost, on each device, is small (Limits)"),
    Claim("T23", "4.12a", "sparse: a node processes fewer words/s than a single node", judges.t23),
    Claim("T11", "4.12b", "sparse: words/s linear in nodes from 3 on", judges.t11),
    Claim("T21", "4.12b", "sparse: with 2 nodes, a node is slower than with 3", judges.t21),
    Claim("T12", "4.13", "sparse faster than 1x1 by 25% (2x1), 80% (3x1), 150% (4x1, about 1x4, 40% faster than 3x1)",
          judges.t12, "the first machine added gains more than in the thesis, the fourth less"),
    Claim("T13", "4.14", "sparse: 2x2 slower than 1x2; 3x2 70% faster; 4x2 about 1x8", judges.t13,
          "sparse 2x2 gains here, and 1x8 learns little from each word"),
    Claim("T29", "4.15", "sparse-overlap 2x1: a client's sync takes longer than a server's update", judges.t29),
    Claim("T14", "4.16", "sparse-overlap: words/s linear in GPUs, more than linear in nodes", judges.t14),
    Claim("T24", "4.16", "sparse-overlap processes slightly fewer words/s than overlap", judges.t24),
    Claim("T15", "4.17-4.18", "overlap on top of sparse: little for single-GPU nodes, 30% for dual-GPU nodes", judges.t15,
          "gradients of overlap are older; with a rate lower by 3.3, that costs half as much (archive)"),
    Claim("T19", "4.18", "3x2 with sparse-overlap is as good as 4x2, with sparse and (by the text) with sparse-overlap",
          judges.t19, "as T15"),
    Claim("T16", "4.19, 4.3", "sparse-overlap: 5x as fast as 1x1 with 7 machines, over 2x with 3, about 4x with 4x2",
          judges.t16, "with overlap, more machines process more words, but each word teaches less"),
    Claim("T22", "4.3", "sparse-overlap is better than SimuParallelSGD", judges.t22,
          "its average, made once at the end, is no better than one device here"),
)  # fmt: skip
CLAIMS: dict[str, tuple[Claim[Results], ...]] = {"Dense exchanges": DENSE, "Sparse exchanges": SPARSE}
