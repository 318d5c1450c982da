"""The virtual clock and its tasks: greenlets that wait for futures, events and locks.

Blocking code runs unchanged: while one task waits, another task runs. Computation alone takes no virtual time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

import simpy
import torch
from greenlet import GreenletExit, getcurrent, greenlet

from nmt_train.simulation.fluid import SECOND
from nmt_train.transport import Aborted, Ended

Callback = Callable[[simpy.Event], None]


class Owner(Protocol):
    """The rank that a task belongs to."""

    failure: BaseException | None

    def check(self) -> None:
        """Raise the error of this rank, if the rank has failed."""

    def fail(self, error: BaseException) -> None:
        """Called when a task of this rank has raised an error."""


class Kernel:
    """The clock and the tasks of all ranks."""

    def __init__(self, on_enter: Callable[[Any], None], start: float = 0.0) -> None:
        """on_enter: called with a task's owner whenever the task continues; start: seconds on the clock at the beginning."""
        self.env, self.hub = simpy.Environment(round(start * SECOND)), getcurrent()
        self.on_enter = on_enter
        self.tasks: dict[Task, None] = {}

    def now(self) -> float:
        """The virtual time in seconds."""
        return self.env.now / SECOND

    def spawn(self, owner: Owner, name: str, function: Callable[[], Any]) -> Task:
        """Start a task at the current virtual time."""
        task = Task(self, owner, name, function)
        self.tasks[task] = None
        return task

    def soon(self, callback: Callback) -> None:
        """Call `callback` at the current virtual time, after all callbacks that are already due."""
        self.env.timeout(0).callbacks.append(callback)

    def after(self, seconds: float, callback: Callback) -> None:
        self.env.timeout(round(seconds * SECOND)).callbacks.append(callback)

    def at(self, seconds: float, callback: Callback) -> None:
        """Call `callback` when the clock shows `seconds`; do nothing if that time is in the past."""
        wait = round(seconds * SECOND) - int(self.env.now)
        if wait >= 0:
            self.env.timeout(wait).callbacks.append(callback)

    def run(self, tasks: Collection[Task]) -> bool:
        """Advance the clock until these tasks have ended; return False if no events are left before that."""
        running = list(tasks)
        while running:
            if running[-1].future.done():
                running.pop()
            elif self.env.peek() == float("inf"):
                return False
            else:
                self.env.step()
        while self.env.peek() == self.env.now:
            self.env.step()  # lets the other tasks of these ranks end
        return True

    def end_tasks(self) -> None:
        """End all tasks that have not ended."""
        for task in [task for task in self.tasks if not task.dead]:
            task.throw(GreenletExit)

    def stop(self, owners: Collection[Owner], error: BaseException) -> None:
        """End the current wait of every task of these ranks, except the calling task."""
        for task in list(self.tasks):
            if task.owner in owners and task is not getcurrent():
                task.stop(task.owner.failure or error)


class Task(greenlet):
    """A greenlet with a name, which belongs to a rank; `waits_for` says what it waits for."""

    def __init__(self, kernel: Kernel, owner: Owner, name: str, function: Callable[[], Any]) -> None:
        super().__init__(self._run, kernel.hub)
        self._kernel, self.owner, self.name, self._function = kernel, owner, name, function
        self.waits_for: str | None = None
        self._awaited: simpy.Event | None = None
        self.future = Future(kernel, f"the end of {name}")
        kernel.soon(self._enter)

    def _run(self) -> None:
        try:
            self.future.set_result(self._function())
        except (GreenletExit, Aborted, Ended) as error:
            self.future.set_exception(error.with_traceback(None))
        except BaseException as error:
            self.owner.fail(error)
            self.future.set_exception(error)
        finally:
            self._kernel.tasks.pop(self, None)
            # An event that never triggers may keep this task alive; the task must not keep the model of its function alive.
            del self._function

    def wait(self, event: simpy.Event, what: str) -> None:
        """Let other tasks run until `event` has happened; raises the owner's error if the owner fails first."""
        self.owner.check()
        self.hold(event, what)

    def hold(self, event: simpy.Event, what: str) -> None:
        """Same as `wait`, but also works if the owner has failed. Keeps the gradient mode, which tasks of one thread share."""
        gradients = torch.is_grad_enabled()
        self._awaited, self.waits_for = event, what
        event.callbacks.append(self._resume)
        try:
            self._kernel.hub.switch()
        finally:
            self._awaited = self.waits_for = None
            torch.set_grad_enabled(gradients)

    def _enter(self, event: simpy.Event) -> None:
        self._kernel.on_enter(self.owner)
        if not self.dead:
            torch.set_grad_enabled(True)
            self.switch()

    def _resume(self, event: simpy.Event) -> None:
        if self._awaited is event:
            self._kernel.on_enter(self.owner)
            self.switch()

    def stop(self, error: BaseException) -> None:
        """End the task's current wait with an error, at the current virtual time."""
        awaited = self._awaited

        def throw(event: simpy.Event) -> None:
            if self._awaited is awaited and awaited is not None:
                self._kernel.on_enter(self.owner)
                # Each task gets its own exception: a shared exception would keep the frames of all tasks alive.
                self.throw(Ended(*error.args) if isinstance(error, Ended) else error)

        if awaited is not None:
            self._kernel.soon(throw)


class Future:
    """A result on the virtual clock."""

    def __init__(self, kernel: Kernel, what: str) -> None:
        self._kernel, self._what = kernel, what
        self._done, self._value = False, None
        self._error: BaseException | None = None
        self._event: simpy.Event | None = None

    def done(self) -> bool:
        return self._done

    def result(self) -> Any:
        if not self._done:
            self._event = self._event or simpy.Event(self._kernel.env)
            current().wait(self._event, self._what)
        if self._error is not None:
            raise self._error
        return self._value

    def set_result(self, value: Any = None) -> None:
        self._done, self._value = True, value
        if self._event is not None:
            self._event.succeed()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self.set_result()


class Event:
    """A flag that tasks wait for; it can be set and cleared repeatedly."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._set = kernel, False
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
            self._event = self._event or simpy.Event(self._kernel.env)
            current().wait(self._event, f"work for {current().name}")


class Lock:
    """A lock for the tasks of one rank, granted in the order of requests; works even if the rank has failed."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._held = kernel, False
        self._queue: deque[simpy.Event] = deque()

    def __enter__(self) -> None:
        if not self._held:
            self._held = True
            return
        turn = simpy.Event(self._kernel.env)
        self._queue.append(turn)
        try:
            current().hold(turn, "a lock of its own rank")
        except BaseException:  # this task gives up its turn, so that no other task waits for it
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
    """The running task."""
    task = getcurrent()
    assert isinstance(task, Task), "only tasks of a rank can wait"
    return task
