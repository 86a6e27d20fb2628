"""Takes locks on open files. The kernel gives them back when the file is closed, or its process
dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager


def try_lock(file: int, *, shared: bool = False) -> bool:
    """Takes the lock, or makes it shared or exclusive; False if somebody else's prevents that."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(file: int) -> Iterator[None]:
    """A context that waits for the exclusive lock of a file, and closes the file at its end."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
