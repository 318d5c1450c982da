"""The claims of five papers, P1 to N1; papers_peers.py and papers_servers.py judge them."""

from __future__ import annotations

from reproduce import papers_peers as peers
from reproduce import papers_servers as servers
from reproduce.claims import Claim
from reproduce.seeded import SeededRuns

CLAIMS: tuple[Claim[SeededRuns], ...] = (
    Claim("P1", "Pipe-SGD 4", "pipe is 2.0 to 3.2 times as fast as sync, 4.0 to 5.4 times as a synchronous server", peers.p1),
    Claim("P2", "Pipe-SGD Eq. 4, 5, 7",
          "a step takes as long as computation or exchange; if computation is longer, efficiency is 1", peers.p2),
    Claim("P3", "Pipe-SGD 3.1", "widths above 2 only do harm", peers.p3),
    Claim("P4, bytes", "Pipe-SGD 4", "half and a quarter of the bytes", peers.p4_bytes),
    Claim("P4, quality", "Pipe-SGD 4", "as good as sync in the end, if the first epochs (here: 100 updates) are sync",
          peers.p4_quality),
    Claim("S1, speed", "Strom Table 2", "4.3, 8.7, 17, 33, 54 times one node's speed with 5, 10, 20, 40, 80", peers.s1_speed),
    Claim("S1, quality", "Strom Table 2", "no loss of quality (here: five nodes)", peers.s1_quality),
    Claim("S2", "Strom Table 3", "quality holds while messages are 278 to 3,893 times smaller, then falls", peers.s2),
    Claim("S3", "Strom 2.5", "10 to 11 bits per update by Golomb-Rice coding", peers.s3),
    Claim("F1", "Farrell & Yang 6", "8 workers need a third of the time of 2; 16 are slower than 4 and 8", servers.f1),
    Claim("F2", "Farrell & Yang 7", "AdaGrad suits many workers, which start worse and end better", servers.f2),
    Claim("A1", "Arnold 3.3", "divided by staleness, asynchronous updates converge almost as well as synchronous ones",
          servers.a1),
    Claim("A2", "Arnold 3.3", "n-softsync goes from asynchronous (n = 1) to synchronous (n = workers)", servers.a2),
    Claim("N1", "Noel & Osindero", "losing up to 10% of messages converges faster than a reliable protocol", servers.n1),
)  # fmt: skip
