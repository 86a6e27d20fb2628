"""Virtual time for real threads: each runs as a greenlet, and only one at a time, in an order that
the seed decides.

Owns the clock, the processes and what it means to pause or kill one. Knows nothing of what runs in
them.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from greenlet import GreenletExit, getcurrent, greenlet

TICK_S = 1e-6


class Stuck(AssertionError):
    """Code runs on and on without any time passing."""


MAX_TURNS_AT_ONCE = 20_000
"""Turns of tasks at one moment of virtual time."""


@dataclass(eq=False, slots=True)
class Process:
    """What is paused and killed together. `skew_s` is how wrong its wall clock is."""

    loom: Loom
    name: str
    skew_s: float = 0.0
    is_alive: bool = True
    is_paused: bool = False
    tasks: list[Task] = field(default_factory=list)
    on_death: list[Callable[[], None]] = field(default_factory=list)
    """What the kernel and the peers notice: sockets close."""
    on_pause: list[Callable[[], None]] = field(default_factory=list)

    def spawn(self, run: Callable[[], object], name: str) -> Task:
        """A thread of this process."""
        task = Task(self, run, name)
        self.tasks.append(task)
        task.wake()
        return task

    def pause(self) -> None:
        """SIGSTOP."""
        self.is_paused = True
        for notice in list(self.on_pause):
            notice()

    def resume(self) -> None:
        """SIGCONT: all that became due meanwhile happens now."""
        self.is_paused = False
        for task in self.tasks:
            if task.is_due:
                task.wake()

    def kill(self) -> None:
        """SIGKILL. Nothing that its threads would do on their way out happens."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.loom.after(0.0, self._bury)
        if getcurrent() in self.tasks:
            raise GreenletExit

    def _bury(self) -> None:
        for notice in self.on_death:
            notice()
        for task in self.tasks:
            if task and not task.dead:
                task.throw(GreenletExit)


class Task(greenlet):
    """One thread."""

    def __init__(self, process: Process, run: Callable[[], object], name: str) -> None:
        super().__init__(self._body, process.loom.hub)
        self.process = process
        self.name = name
        self.entry = run
        self.turn = 0
        """Of several wakes that wait for a task, only the one of its present turn counts."""
        self.is_due = False
        self.is_done = Event()

    def _body(self) -> None:
        self.entry()
        self.is_done.set()

    def wake(self, at_s: float = 0.0) -> None:
        """Runs it at that moment, or now if it is over, unless something else wakes it before."""
        turn = self.turn
        self.process.loom.at(at_s, lambda: self._step(turn))

    def _step(self, turn: int) -> None:
        if turn != self.turn or self.dead or not self.process.is_alive:
            return
        if self.process.is_paused:
            self.is_due = True
            return
        self.turn += 1
        self.is_due = False
        self.switch()


class Loom:
    """Virtual time. The same seed gives the same run."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.hub = getcurrent()
        self.num_turns = 0
        self._order = itertools.count()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, at_s: float, call: Callable[[], None]) -> None:
        """In the hub: must not block."""
        heapq.heappush(self._calls, (max(self.now_s, at_s), next(self._order), call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """The same, from now on."""
        self.at(self.now_s + delay_s, call)

    def run_until(self, end_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Until this moment, or until `is_over`."""
        num_at_once = 0
        while self._calls and self._calls[0][0] <= end_s and not is_over():
            at_s, _, call = heapq.heappop(self._calls)
            num_at_once = num_at_once + 1 if at_s == self.now_s else 0
            if num_at_once > MAX_TURNS_AT_ONCE:
                raise Stuck(f"time stands still at {self.now_s:.3f} s")
            self.now_s = at_s
            self.num_turns += 1
            call()
        if not is_over():
            self.now_s = max(self.now_s, end_s)


class Threads:
    """The one loom that runs now, for code that asks for the time or the current thread."""

    def __init__(self) -> None:
        self.loom: Loom | None = None


threads = Threads()


def current() -> Task:
    """The task that runs."""
    task = getcurrent()
    assert isinstance(task, Task), "only inside a simulated process"
    return task


def now_s() -> float:
    """The time of all clocks, but for the wall clocks' errors."""
    assert threads.loom is not None
    return threads.loom.now_s


def park(until_s: float | None = None) -> None:
    """Give way until woken, or until that moment."""
    task = current()
    if not task.process.is_alive:
        raise GreenletExit
    if until_s is not None:
        task.wake(until_s)
    task.process.loom.hub.switch()


def elapse(duration_s: float) -> None:
    """Wakes of others do not shorten it."""
    end_s = now_s() + duration_s
    park(end_s)
    while now_s() < end_s:
        park(end_s)


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._flag = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        """The flag."""
        return self._flag

    def set(self) -> None:
        """Wakes all who wait."""
        self._flag = True
        waiters = self._waiters
        self._waiters = []
        for task in waiters:
            task.wake()

    def clear(self) -> None:
        """Lowers the flag."""
        self._flag = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until set. A wait takes some time, however short: rounding must not make a loop spin."""
        if self._flag:
            return True
        until_s = None if timeout_s is None else now_s() + timeout_s + TICK_S
        task = current()
        while not self._flag and (until_s is None or now_s() < until_s):
            self._waiters.append(task)
            park(until_s)
            if task in self._waiters:
                self._waiters.remove(task)
        return self._flag
