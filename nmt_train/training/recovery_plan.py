"""Plans which surviving rank sends which part of the state to which rank; all ranks compute the same plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from nmt_train.corpus.data_shard import Position, from_plain
from nmt_train.transport import Lost, Messages
from nmt_train.transport.collective import broadcast, gather

Facts = dict[str, Any]
_PARAMETERS, _MEAN = "parameters", "smoothed"


@dataclass(frozen=True)
class Source:
    """A description, known to all ranks, of the slice from `start` to `stop` that a rank holds (see `RecoveryPiece`).

    number: the index of the piece at that rank; 0 is what the rank's own optimizer updates.
    """

    rank: int
    number: int
    start: int
    stop: int
    updates: int
    names: Sequence[str]
    exact: bool
    has_optimizer: bool  # whether it includes the optimizer's whole state


@dataclass(frozen=True)
class Move:
    """A transfer of the elements from `start` to `stop` of vector `name`; taken: the name of the vector at the source."""

    source: Source
    name: str
    taken: str
    start: int
    stop: int
    receiver: int


@dataclass
class Inventory:
    """What every surviving rank holds (`SurvivorState.facts`), by the rank's present number. elements: of all parameters."""

    said: list[Facts]
    elements: int

    @classmethod
    def gather(cls, transport: Messages, mine: Facts, elements: int) -> Inventory:
        """Tell all ranks the facts of every rank. mine: the facts of this rank."""
        return cls(broadcast(transport, {"said": gather(transport, mine)}, "said")["said"], elements)

    @property
    def begun(self) -> bool:
        """Whether any rank knows that training had begun."""
        return any(facts["leader"] is not None for facts in self.said)

    @cached_property
    def leader(self) -> Facts:
        """The newest state of rank 0 that any surviving rank knows."""
        known = [facts["leader"] for facts in self.said if facts["leader"] is not None]
        newest: Facts = max(known, key=lambda state: (state["generation"], state["assignments"], state["progress"]["tokens"]))
        return newest

    def stages(self) -> list[list[Position]]:
        """The earlier stages, followed by the positions where all workers stopped, both surviving and ended ones.

        A worker that has ended may have completed an update that no survivor has: then its batches in it are trained again.
        """
        leader, newest = self.leader, self.newest
        positions = from_plain([leader["positions"]])[0]
        for rank, (updates, *before) in leader["ahead"].items():
            if updates > newest:
                positions[int(rank)] = Position(*before)
        for facts in self.said:
            rank = facts["ranks"][leader["generation"]]
            # A rank that reports another assignment had not received the leader's and has trained no batch of it: keep the
            # leader's record of its position.
            known = (facts["generation"], facts["assignments"]) == (leader["generation"], leader["assignments"])
            if known and rank < len(positions):
                positions[rank] = Position(*facts["settled"])
        return [*from_plain(leader["stages"]), positions]

    @cached_property
    def sources(self) -> list[Source]:
        return [
            Source(rank, number, start, stop, piece["updates"], piece["names"], piece["exact"], piece["numbers"] is not None)
            for rank, facts in enumerate(self.said) for number, piece in enumerate(facts["pieces"])
            for start, stop in [piece["place"]] if start < stop
        ]  # fmt: skip

    @property
    def newest(self) -> int:
        """The highest number of updates that any rank knows of.

        If every rank updates a copy of all parameters, one that has ended may have reported an update that no other rank has
        completed: it does not count.
        """
        own = [source for source in self.sources if not source.number]
        made = max((source.updates for source in self.sources), default=0)
        if own and all((source.start, source.stop) == (0, self.elements) for source in own):
            return made
        return max(made, self.leader["updates"], *(int(facts["updates"]) for facts in self.said))

    def numbers(self) -> dict[str, Any] | None:
        """The optimizer's counters, from the newest source that has them; None if no source does."""
        complete = [source for source in self.sources if source.has_optimizer]
        newest = max(complete, key=lambda source: (source.updates, -source.rank), default=None)
        if newest is None:
            return None
        numbers: dict[str, Any] = self.said[newest.rank]["pieces"][newest.number]["numbers"]
        return numbers

    def plan(self, wanted: Sequence[slice]) -> list[Move]:
        """Plan which rank sends what, so that every rank gets all available state of its slice in `wanted`.

        If a shard was lost together with its copy, its optimizer state restarts at zero. Raises Lost if some of the parameters
        are on no surviving rank.
        """
        sources = self.sources
        names = {_PARAMETERS}.union(*(source.names for source in sources if source.has_optimizer))
        borders = sorted({place for source in sources for place in (source.start, source.stop)})
        moves: list[Move] = []
        for receiver, target in enumerate(wanted):
            cuts = [target.start, *(place for place in borders if target.start < place < target.stop), target.stop]
            for name in sorted(names) if target.start < target.stop else []:
                for start, stop in pairwise(cuts):
                    there = [source for source in sources if source.start <= start and stop <= source.stop]
                    able, taken = [source for source in there if name in source.names], name
                    if not able and name == _MEAN:  # the running mean restarts from the parameters
                        able, taken = [source for source in there if _PARAMETERS in source.names], _PARAMETERS
                    if able:
                        moves.append(Move(max(able, key=_worth(receiver)), name, taken, start, stop, receiver))
                    elif name == _PARAMETERS:
                        raise Lost(
                            "all ranks that held some part of the parameters have ended; start the same command again: it"
                            " continues from the last checkpoint"
                        )
        return moves

    @property
    def repeated_batches(self) -> int:
        """Batches that surviving ranks will train again, because their gradients may have been in flight."""
        return sum(int(facts["repeated_batches"]) for facts in self.said)

    def lost(self, moves: Sequence[Move]) -> int:
        """The maximum number of updates that a part of the parameters lost because an older version replaced the newest one."""
        taken = [move.source.updates for move in moves if move.name == _PARAMETERS and move.source.number]
        before = max(int(facts["lost"]) for facts in self.said)
        return max([before, *(self.newest - updates for updates in taken)])


def _worth(receiver: int) -> Callable[[Source], tuple[int, ...]]:
    """A sort key that prefers exact sources, then newer ones, then whole ones, then the receiver's own.

    The receiver's own is preferred only if it is exact: otherwise, equal numbers of updates do not imply equal values.
    """

    def worth(source: Source) -> tuple[int, ...]:
        own = source.exact and source.rank == receiver
        return (source.exact, source.updates, source.has_optimizer, own, -source.rank, -source.number)

    return worth
