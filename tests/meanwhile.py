"""A thread that works beside the caller until that is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread


@contextmanager
def meanwhile(work: Callable[[Event], None]) -> Iterator[None]:
    """Runs `work` in a thread; it ends soon after the event is set, on leaving."""
    over = Event()
    thread = Thread(target=work, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
