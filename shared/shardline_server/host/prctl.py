"""What a process asks of Linux about itself and its relatives: who ends with whom, who adopts whom,
its short name."""

from __future__ import annotations

import ctypes
import os
import signal

_SET_DEATH_SIGNAL = 1
_SET_NAME = 15
_SET_CHILD_SUBREAPER = 36
NAME_MAX_BYTES = 15


def die_with_parent() -> None:
    """SIGKILL reaches this process when the parent that it has now ends. Raises OSError."""
    _prctl(_SET_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL))


def adopt_orphans() -> None:
    """Makes descendants of ended parents children of this process, not of init. Raises OSError."""
    _prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def name_process(name: str) -> None:
    """The name that `top` and `ps -o comm` show, cut to NAME_MAX_BYTES. Raises OSError."""
    _prctl(_SET_NAME, ctypes.c_char_p(name.encode()[:NAME_MAX_BYTES]))


def _prctl(option: int, value: ctypes.c_ulong | ctypes.c_char_p) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(
        option, value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
