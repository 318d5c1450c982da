"""Shared capacities: transfers share each direction of a network card, and tasks share a device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import simpy

SECOND = 1_000_000_000  # ticks of the virtual clock, which counts whole nanoseconds, so that sums are exact
_LAST = 10  # event priority: after all other events of the same time


class Capacity:
    """`rate` units per second, divided equally among all current uses."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.uses: dict[Use, None] = {}  # in order of arrival
        self.free = 0  # virtual time [ns] at which the last `Shares.turn` ends

    def share(self) -> float:
        return self.rate / len(self.uses)


class Use(simpy.Event):
    """An event that triggers when `capacities` have jointly served an amount, at the smallest of their current shares."""

    def __init__(self, shares: Shares, amount: float, capacities: Sequence[Capacity]) -> None:
        super().__init__(shares.env)
        self.capacities, self._shares = capacities, shares
        self._left, self._rate, self._since = amount, 0.0, int(shares.env.now)
        self._alarm: int | None = None  # virtual time of the next check

    def adjust(self) -> None:
        """Account for what has been served so far, and continue at the new rate."""
        now = int(self.env.now)
        self._left = max(0.0, self._left - self._rate * (now - self._since) / SECOND)
        self._since, self._rate = now, min(capacity.share() for capacity in self.capacities)
        end = self._end()
        if end is not None and (self._alarm is None or end < self._alarm):
            self._alarm = end
            self.env.timeout(end - now).callbacks.append(self._look)

    def _end(self) -> int | None:
        """The virtual time [ns] at which the amount is served if no rate changes; None: never."""
        if not self._left:
            return self._since
        return self._since + math.ceil(self._left * SECOND / self._rate - 1e-6) if self._rate else None

    def _look(self, event: simpy.Event) -> None:
        now = int(self.env.now)
        if self.triggered or now != self._alarm:
            return  # already served, or another check replaces this one
        end = self._end()
        self._alarm = None
        if end is not None and end <= now:
            self._shares.end(self)
        elif end is not None:
            self._alarm = end
            self.env.timeout(end - now).callbacks.append(self._look)


class Shares:
    """Maintains the rates of all uses. Several changes at one virtual time adjust each affected use only once."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self._changed: dict[Capacity, None] = {}

    def use(self, amount: float, *capacities: Capacity) -> Use:
        use = Use(self, amount, capacities)
        for capacity in capacities:
            capacity.uses[use] = None
            self.change(capacity)
        return use

    def turn(self, amount: float, *capacities: Capacity) -> simpy.Event:
        """Same as `use`, but each capacity serves one amount at a time, in the order of calls.

        The capacities form a pipeline: an amount may enter the next capacity before it has left the previous one.
        """
        now = start = int(self.env.now)
        end = now
        for capacity in capacities:
            start = max(start, capacity.free)
            end = max(end, start + math.ceil(amount * SECOND / capacity.rate - 1e-6))
            capacity.free = end
        return self.env.timeout(end - now)

    def end(self, use: Use) -> None:
        for capacity in use.capacities:
            capacity.uses.pop(use, None)
            self.change(capacity)
        if not use.triggered:
            use.succeed()

    def change(self, capacity: Capacity) -> None:
        """Record that the rate or the uses of `capacity` have changed."""
        if not self._changed:
            event = simpy.Event(self.env)
            event._ok, event._value = True, None
            event.callbacks.append(self._adjust)
            self.env.schedule(event, priority=_LAST)  # type: ignore[arg-type]
        self._changed[capacity] = None

    def _adjust(self, event: simpy.Event) -> None:
        touched = dict.fromkeys(use for capacity in self._changed for use in capacity.uses)
        self._changed.clear()
        for use in touched:
            use.adjust()
