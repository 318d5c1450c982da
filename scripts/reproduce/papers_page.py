"""The reproduction of five papers as a page: a table of their claims, and a picture for each."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from reproduce import papers_claims, papers_servers
from reproduce.claims import judged, tally, verdict
from reproduce.papers_pictures import PICTURES, draw
from reproduce.runs import CURVES, MEASURES, Missing
from reproduce.seeded import SeededRuns

_ABOUT = """# Claims of five papers, tried on simulated clusters

**Of {claims} claims of five papers, {tally}.**

All is simulated (s), on clusters and with model sizes like the papers'. Values without a range are of one run (1),
unless said. `scripts/reproduce/papers` makes this page from systems/{curves} and systems/{measures}.

{findings}## Limits

- A small transformer on Multi30k stands for images, speech and large models; 2M words are four epochs. Read "does not
  hold" as "not early in the training of a small model".
- Adam with clipped gradients, except in `downpour`; only A1's rates were tuned, beta1 and warm-ups nowhere. Tune a
  method before you reject it ([comparison.md](comparison.md)).
- Single runs scatter. Trust verdicts, which three seeds decide near a limit; values within 10% may be equal.
- Costs and bandwidths that papers do not give were guessed (S1: 700 Mbit/s). See configs/clusters/pipesgd.yml,
  strom.yml, downpour.yml, arnold.yml.
- Some rules of verdicts changed when results were known. The [archive](archive/systems-protocol.md) says which, with
  all values, reasons and objections.

## Verdicts

Cross-entropies are those after equal words (F2: times), means of three seeds where these decide. A number holds within
10%, a range as it stands, quality within 2%.

"""


# Of the runs in docs/systems; left out while runs are missing.
_FINDINGS = """\
**Pipe-SGD** (Li et al. 2018). Wider pipelines than two steps learn less and are no faster, as the paper says. But width
2 learns less than `sync`, even if its first updates are those of `sync`. The speedups depend on the time of a batch, which the
paper does not give: 0.27 s was added to make both ranges hold, so P1 is *fitted*. P2 compares the simulator with the
paper's equations, not with machines.

**Strom 2015.** Words/s grow more with nodes than in the paper: simulated nodes have constant speed, and load no data
over the network. Whatever the threshold, five nodes learn less per word than one. Own updates applied at once narrow
the gap (2.860); one node first does only with a slower halving of the rate (2.914) than the paper's (3.109).
[Tuned](comparison.md), four machines need 1.4 times the words of one.

**Farrell and Yang 2016.** More workers process more words/s, and need as many more words. A warm-up, which the paper
does not have, makes eight and sixteen workers faster, and two slower to the early target (table below). F2 compares
at equal times: a quarter of the time that eight take, and all of it.

**Zhang et al. 2016, in Arnold's survey.** Where workers are equally fast, all gradients are about as stale, so dividing
by staleness is just another learning rate. With a slow worker it gains 0.3%, less than the 2% that count. Softsync does
not approach `sync`, since workers never wait.

**Noel and Osindero 2014, as the thesis cites them (2.3.4).** Losing 10% of the gradients teaches more than sending them
again. Whether it beats losing none is open: the ranges overlap. It saves no time here, since workers compute while
messages are sent again.

"""


def write(found: SeededRuns, output: Path) -> None:
    """Draw the figures and write `output` (Markdown) from the CSV files of `found`; missing runs are reported on the page."""
    pictures = output.with_suffix("")
    claims = papers_claims.CLAIMS
    findings = _FINDINGS if all(judged(claim, found)[1] for claim in claims) else ""
    about = _ABOUT.format(claims=len(claims), tally=tally(claims, found), curves=CURVES, measures=MEASURES, findings=findings)
    lines = [about + "\n".join(_verdicts(found)), ""]
    with suppress(Missing):
        times = papers_servers.downpour_times(found)
        lines += ["F1, by workers, to two targets (1):", "", *times]
    for name, (title, _) in PICTURES.items():
        if draw(found, name, pictures):
            lines += [title, "", f"![{name}]({pictures.name}/{name}.svg)", ""]
    output.write_text("\n".join(lines), encoding="utf-8")


def _verdicts(found: SeededRuns) -> list[str]:
    """Lines of Markdown: a row for each claim."""
    lines = ["| row | paper | claim | here | verdict |", "|---|---|---|---|---|"]
    for claim in papers_claims.CLAIMS:
        text, clauses = judged(claim, found)
        lines.append(f"| {claim.id} | {claim.source} | {claim.says} | {text} | {verdict(clauses) if clauses else '-'} |")
    return lines
