"""Tasks of a simulated cluster as greenlets, and what they wait for: futures, events and locks on the virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import simpy
import torch
from greenlet import GreenletExit, getcurrent, greenlet

from nmt_train.distributed.transport import Aborted, Ended

if TYPE_CHECKING:
    from nmt_train.simulation.engine import Engine
    from nmt_train.simulation.virtual_transport import VirtualWire


class Task(greenlet):
    """A greenlet with a name, on one rank; `waits_for` says what, while it waits."""

    def __init__(self, engine: Engine, wire: VirtualWire, name: str, function: Callable[[], Any]) -> None:
        super().__init__(self._run, engine.hub)
        self._engine, self.wire, self.name, self._function = engine, wire, name, function
        self.waits_for: str | None = None
        self._awaited: simpy.Event | None = None
        self.receipt = Receipt(engine, f"the end of {name}")
        engine.soon(self._enter)

    def _run(self) -> None:
        try:
            self.receipt.set(self._function())
        except (GreenletExit, Aborted, Ended) as error:
            self.receipt.set_exception(error.with_traceback(None))
        except BaseException as error:
            self.wire.fail(error)
            self.receipt.set_exception(error)
        finally:
            self._engine.tasks.pop(self, None)
            del self._function  # an event that never comes may keep this task, which is to keep nothing that it worked on

    def wait(self, event: simpy.Event, what: str) -> None:
        """Let other tasks go on until `event` has happened; the wire's error if it fails before."""
        self.wire.check()
        self.hold(event, what)

    def hold(self, event: simpy.Event, what: str) -> None:
        """`wait`, also when the wire has failed; what torch keeps per thread is this task's again afterwards."""
        gradients = torch.is_grad_enabled()
        self._awaited, self.waits_for = event, what
        event.callbacks.append(self._resume)
        try:
            self._engine.hub.switch()
        finally:
            self._awaited = self.waits_for = None
            torch.set_grad_enabled(gradients)

    def _enter(self, event: simpy.Event) -> None:
        self._engine.enter(self.wire)
        if not self.dead:
            torch.set_grad_enabled(True)
            self.switch()

    def _resume(self, event: simpy.Event) -> None:
        if self._awaited is event:
            self._engine.enter(self.wire)
            self.switch()

    def stop(self, error: BaseException) -> None:
        """End its wait with an error, at this instant."""
        awaited = self._awaited

        def throw(event: simpy.Event) -> None:
            if self._awaited is awaited and awaited is not None:
                self._engine.enter(self.wire)
                self.throw(Ended(*error.args) if isinstance(error, Ended) else error)  # another for each task

        if awaited is not None:
            self._engine.soon(throw)


class Receipt:
    """A future on the virtual clock."""

    def __init__(self, engine: Engine, what: str) -> None:
        self._engine, self._what = engine, what
        self._done, self._value = False, None
        self._error: BaseException | None = None
        self._event: simpy.Event | None = None

    def done(self) -> bool:
        return self._done

    def result(self) -> Any:
        if not self._done:
            self._event = self._event or simpy.Event(self._engine.env)
            current().wait(self._event, self._what)
        if self._error is not None:
            raise self._error
        return self._value

    def set(self, value: Any = None) -> None:
        self._done, self._value = True, value
        if self._event is not None:
            self._event.succeed()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self.set()


class Signal:
    """An event that can be set and cleared as often as one likes."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._set = engine, False
        self._event: simpy.Event | None = None

    def set(self) -> None:
        self._set = True
        if self._event is not None:
            self._event.succeed()
            self._event = None

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self) -> None:
        while not self._set:
            self._event = self._event or simpy.Event(self._engine.env)
            current().wait(self._event, f"work for {current().name}")


class Lock:
    """Mutual exclusion of the tasks of a rank, first come, first served; also when their wire has failed."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._held = engine, False
        self._queue: deque[simpy.Event] = deque()

    def __enter__(self) -> None:
        if not self._held:
            self._held = True
            return
        turn = simpy.Event(self._engine.env)
        self._queue.append(turn)
        try:
            current().hold(turn, "a lock of its own rank")
        except BaseException:  # it will not come, and nobody should wait for it to go
            if turn in self._queue:
                self._queue.remove(turn)
            else:
                self.__exit__()
            raise

    def __exit__(self, *details: object) -> None:
        if self._queue:
            self._queue.popleft().succeed()
        else:
            self._held = False


def current() -> Task:
    task = getcurrent()
    assert isinstance(task, Task), "only tasks of a rank can wait"
    return task
