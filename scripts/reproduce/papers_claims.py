"""The claims of five papers, P1 to N1; papers_peers.py and papers_servers.py judge them."""

from __future__ import annotations

from reproduce import papers_peers as peers
from reproduce import papers_servers as servers
from reproduce.claims import Claim
from reproduce.seeded import SeededRuns

CLAIMS: tuple[Claim[SeededRuns], ...] = (
    Claim("P1", "Pipe-SGD 4", "pipe is 2.0 to 3.2 times as fast as sync, 4.0 to 5.4 times as a synchronous server",
          peers.p1,
          fitted="the time of a batch, which the paper does not give. Both ranges hold with none of the five times that were"
          " tried first; 0.27 s was added, between two of them"),
    Claim("P2", "Pipe-SGD Eq. 4, 5, 7",
          "a step takes as long as the longer of computation and exchange; efficiency is 1 if computation is longer (this"
          " compares the simulator with equations, not with the paper's machines)",
          peers.p2, "copying, encoding and decoding also use the device, for up to 6% of a step of 0.12 s"),
    Claim("P3", "Pipe-SGD 3.1", "widths above 2 only do harm", peers.p3,
          "wider pipelines have older gradients, and no more words/s"),
    Claim("P4, bytes", "Pipe-SGD 4", "half and a quarter of the bytes", peers.p4_bytes,
          "by construction: 16 and 8 of 32 bits are sent"),
    Claim("P4, quality", "Pipe-SGD 4",
          "as good as sync at the end of training, if the first epochs are sync (here: the first 100 of 880 updates)",
          peers.p4_quality,
          "learning rate, its warm-up and beta1 are those of sync; whether others would help pipe was not tried"),
    Claim("S1, speed", "Strom Table 2", "4.3, 8.7, 17, 33, 54 times one node's speed with 5, 10, 20, 40, 80 nodes",
          peers.s1_speed,
          "all five are too fast, by 9% to 34% (up to 10% counts as equal). Simulated nodes have the same constant speed and"
          " load no data over the network; that it has 700 Mbit/s is a guess"),
    Claim("S1, quality", "Strom Table 2", "no loss of quality (here: five nodes)", peers.s1_quality,
          "the peak rate is that of one node; beta1 (0.1) and the warm-up (1,170 updates) are our defaults for five workers."
          " Tuned, on another cluster, four workers still need 1.4 times the words of one if they send 3%, 1.5 times with 1%"
          " (comparison.md)"),
    Claim("S2", "Strom Table 3",
          "with 40 nodes, quality holds over a wide range of thresholds (messages 278 to 3,893 times smaller), then falls",
          peers.s2,
          "whatever the threshold, five workers learn less than one node (S1)"),
    Claim("S3", "Strom 2.5", "10 to 11 bits per update by Golomb-Rice coding", peers.s3,
          "1 of 781 elements is sent; gaps between independent ones then have an entropy of 11.1 bits, plus one bit for the"
          " sign. The paper does not say how many it sent; with 1 of 278, its most, this would be 10.6 bits (calculated)"),
    Claim("F1", "Farrell & Yang 6", "8 workers need a third of the time of 2; 16 are slower than 4 and 8", servers.f1,
          "without a warm-up, more workers need more words, which cancels their gain in words/s. With a warm-up (not in the"
          " paper, not judged), 16 are faster than 8. Each with its better setting, 8 need 0.97 of the time of 2 (to 3.5:"
          " 0.48); if the 8 join in waves (the paper's outlook; one run), 0.99 and 0.60. The paper does not name the optimizer"
          " of this experiment; here it is AdaGrad, as in F2"),
    Claim("F2", "Farrell & Yang 7", "AdaGrad suits many workers, which start worse and end better", servers.f2,
          "the rate of AdaGrad was chosen with two workers, and that of SGD was not tuned; with a warm-up, which SGD did not"
          " get, AdaGrad loses less"),
    Claim("A1", "Arnold 3.3", "divided by staleness, asynchronous updates converge almost as well as synchronous ones",
          servers.a1,
          "beta1 is 0.9 for all three, which is high for asynchronous workers. Where workers have equal speeds, all"
          " gradients are about as stale, and dividing by staleness is no more than another rate: the two curves of"
          " cross-entropy by rate coincide, but for a factor of about six. With a slow worker, dividing is better by 0.3%,"
          " which is less than the 2% that count as a difference; with a low beta1, it is worse (single runs). Rates were"
          " searched for neither of these two"),
    Claim("A2", "Arnold 3.3", "n-softsync goes from asynchronous (n = 1) to synchronous (n = workers)", servers.a2,
          "here, updates are also divided by staleness (Zhang et al. 2016), and workers never wait, so n = 8 is not sync:"
          " it learns least of all, while n = 2 and n = 4 learn 2% and 4% more than n = 1."
          " All have the best rate of sync (0.008485); half of it is better for n = 1 (A1)"),
    Claim("N1", "Noel & Osindero, in thesis 2.3.4",
          "with up to 10% of messages lost by an unreliable protocol, convergence is faster than with a reliable one",
          servers.n1,
          "workers compute while messages are sent again. Whether losing 10% is better than losing none is not known: the"
          " ranges of three seeds overlap"),
)  # fmt: skip
