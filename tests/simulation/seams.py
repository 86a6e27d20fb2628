"""Where the simulation takes the place of the world: threads, clocks, sockets, servers. All else is the product."""

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

from services.relay import outbox as relay_outbox
from services.relay import sweeper as relay_sweeper
from services.stage import head
from services.stage.jobs import claimer, finisher, heartbeater, readiness
from services.stage.pipeline import epochs
from shardline.store.sweeps import Partial
from tests.simulation import pipeline_statements, statements
from tests.simulation.loom import Event, Loom, current, now_s, threads


class PartialTexts:
    """Knows a text only after `catch_up`, as the relay's own."""

    def __init__(self, _database: object, *, budget_s: float) -> None:
        self._budget_s = budget_s
        self._texts: dict[object, str] = {}
        self._unknown: list[Partial] = []
        self.was_asked = False

    def __call__(self, partial: Partial) -> str | None:
        """The text, or a note that it is wanted."""
        self.was_asked = True
        self._unknown.append(partial)
        return self._texts.get(partial.key)

    def catch_up(self) -> None:
        """Texts of what was asked for."""
        self._texts = {partial.key: "".join(f"<{token}>" for token in partial.ids) for partial in self._unknown}
        self._unknown, self.was_asked = [], False


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
    (heartbeater, "leases", statements),
    (finisher, "leases", statements),
    (finisher, "ends", statements),
    (finisher, "crashes", statements),
    (claimer, "claims", statements),
    (claimer, "crashes", statements),
    (claimer, "outbox", statements),
    (readiness, "pipelines", pipeline_statements),
    (head, "leases", statements),
    (epochs, "pipelines", pipeline_statements),
    (head, "register_model", lambda *_: None),
    (relay_outbox, "outbox", statements),
    (relay_sweeper, "sweeps", statements),
    (relay_sweeper, "PartialTexts", PartialTexts),
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
