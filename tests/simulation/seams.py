"""What the simulation replaces in the standard library: threads and the clock.

Servers and sockets it gives to the product as `Backends` and `SocketFactory`: see `machines`. All
else is the product.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import structlog

from tests.simulation.loom import Event, Loom, current, now_s, threads


def _start(thread: threading.Thread) -> None:
    vars(thread)["simulated"] = current().process.spawn(thread.run, thread.name)


def _join(thread: threading.Thread, timeout: float | None = None) -> None:
    vars(thread)["simulated"].is_done.wait(timeout)


def _is_alive(thread: threading.Thread) -> bool:
    task = vars(thread).get("simulated")
    return task is not None and not task.dead


def _clock_gettime(clock: int) -> float:
    """Of the clocks only that of the wall jumps."""
    return now_s() + (current().process.skew_s if clock == time.CLOCK_REALTIME else 0.0)


SEAMS: tuple[tuple[Any, str, Any], ...] = (
    (threading.Thread, "start", _start),
    (threading.Thread, "join", _join),
    (threading.Thread, "is_alive", _is_alive),
    (threading, "Event", Event),
    (time, "clock_gettime", _clock_gettime),
)


@contextmanager
def seams() -> Iterator[Callable[[Loom], None]]:
    """While inside, threads and clocks are those of the loom that the function names."""
    state = random.getstate()
    config = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with ExitStack() as stack:
        for target, name, replacement in SEAMS:
            stack.enter_context(patch.object(target, name, replacement))
        yield _use
    threads.loom = None
    structlog.configure(**config)
    random.setstate(state)


def _use(loom: Loom) -> None:
    threads.loom = loom
    random.seed(loom.rng.random())
