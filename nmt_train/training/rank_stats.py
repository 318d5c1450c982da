"""Statistics of traffic and time on every rank between two log lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from nmt_train.run.log import Log
    from nmt_train.run.progress import Progress
    from nmt_train.training.worker import Worker

_MAIN = "MainThread"
_SHOWN = ("forward", "backward", "update", "encode", "decode", "sync", "waiting")


class Totals(NamedTuple):
    """Nested numbers as `Worker.measured` returns them, in a compact form.

    form: the same with zeros instead of the numbers. whole, real: the numbers.
    """

    form: Any
    whole: tuple[int, ...]
    real: tuple[float, ...]

    @classmethod
    def of(cls, nested: Any) -> Totals:
        whole: list[int] = []
        real: list[float] = []

        def form(value: Any) -> Any:
            if isinstance(value, dict):
                return {str(key): form(inner) for key, inner in value.items()}
            if isinstance(value, list):
                return [form(inner) for inner in value]
            (whole if isinstance(value, int) else real).append(value)
            return type(value)()

        return cls(form(nested), tuple(whole), tuple(real))

    def nested(self) -> Any:
        """The nested numbers. Raises an error if they do not fit the form."""
        numbers: dict[type, Iterator[Any]] = {int: iter(self.whole), float: iter(self.real)}

        def value(form: Any) -> Any:
            if isinstance(form, dict):
                return {key: value(inner) for key, inner in form.items()}
            if isinstance(form, list):
                return [value(inner) for inner in form]
            return next(numbers[type(form)])

        nested = value(self.form)
        if [*numbers[int], *numbers[float]]:
            raise ValueError("more totals than their form has places")
        return nested


class RankStatistics:
    """Keeps the newest totals of every rank, and logs how much they have grown since the previous log line."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        size = worker.transport.size
        self._totals = [Totals.of({})] * size
        self._before = [Totals.of({})] * size
        self._others = worker.progress.words()  # tokens since the last log line that rank 0 has not trained since this start
        self._words = [0] * size
        self._since = worker.transport.now()

    def report(self, rank: int, words: int, totals: Totals) -> None:
        """Record the totals of a rank; words: its tokens since its last report."""
        self._words[rank] += words
        self._totals[rank] = totals
        if rank:
            self._others += words

    def log(self, log: Log, progress: Progress, words: int) -> None:
        """Write one log line and one event for the time since the last call; words: tokens of all ranks in that time."""
        now = self._worker.transport.now()
        seconds, self._since = max(now - self._since, 1e-9), now
        self.report(0, words - self._others, Totals.of(self._worker.measured()))
        ranks = [
            {
                "rank": rank,
                "node": self._worker.transport.nodes[rank],
                "words_per_second": self._words[rank] / seconds,
                **_less(new.nested(), old.nested()),
            }
            for rank, (new, old) in enumerate(zip(self._totals, self._before, strict=True))
        ]
        self._before, self._words, self._others = list(self._totals), [0] * len(ranks), 0
        log.ranks(progress, _line(ranks, seconds) if len(ranks) > 1 else "", {"interval": seconds, "ranks": ranks})


def _less(new: Any, old: Any) -> Any:
    """Nested numbers of `new` minus those of `old`."""
    if isinstance(new, dict):
        return {str(key): _less(value, (old or {}).get(key)) for key, value in new.items()}
    if isinstance(new, list):
        return [_less(value, old[place] if old else 0) for place, value in enumerate(new)]
    return new - (old or 0)


def _line(ranks: list[dict[str, Any]], seconds: float) -> str:
    """A log line with sums and means over the ranks."""
    speeds = " + ".join(f"{rank['words_per_second']:.0f}" for rank in ranks) if len(ranks) <= 8 else f"{len(ranks)} ranks"
    sent, received = (sum(sum(count[1] for count in rank[way].values()) for rank in ranks) for way in ("sent", "received"))
    main_thread = [rank["spent"].get(_MAIN, {}) for rank in ranks]
    all_threads = [_sum_of_threads(rank["spent"]) for rank in ranks]
    shares = []
    for name in _SHOWN:
        spent = sum(spans.get(name, 0.0) for spans in (main_thread if name in ("waiting", "sync") else all_threads))
        if spent:
            shares.append(f"{name} {spent / seconds / len(ranks):.1%}")
    text = f"{speeds} words/s : sent {sent / 1e6 / seconds:.2f} MB/s : received {received / 1e6 / seconds:.2f} MB/s"
    text += f" : {' '.join(shares)}"
    for what in ("staleness", "steps"):
        counts = sum((Counter(rank[what]) for rank in ranks), Counter[str]())
        if total := counts.total():
            label = "staleness" if what == "staleness" else "steps per exchange"
            text += f" : {label} {sum(int(key) * count for key, count in counts.items()) / total:.2f}"
    return text


def _sum_of_threads(spent: dict[str, dict[str, float]]) -> dict[str, float]:
    """The seconds of each span name, summed over all threads of a rank."""
    total: dict[str, float] = {}
    for spans in spent.values():
        for name, value in spans.items():
            total[name] = total.get(name, 0.0) + value
    return total
