"""Signals as something to wait for, in the main thread: a stop that was asked for, a child that
ended."""

from __future__ import annotations

import select
import signal
import socket
from types import FrameType, TracebackType
from typing import Self

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """While entered, Ctrl-C, SIGTERM and SIGHUP are counted as requests to stop, and wake `wait`;
    so does SIGCHLD."""

    def __init__(self) -> None:
        self.num_stops = 0
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> Self:
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # `nohup make up` means it.
        heard = [number for number in STOP if not _is_ignored_hangup(number)]
        self._previous = {
            number: signal.signal(number, self._count) for number in (*heard, signal.SIGCHLD)
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()

    def wait(self, timeout_s: float) -> None:
        """Return at the next signal, or after `timeout_s`."""
        if select.select([self._reader], [], [], max(0.0, timeout_s))[0]:
            self._reader.recv(4096)

    def _count(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 (a handler's)
        if number in STOP:
            self.num_stops += 1


def _is_ignored_hangup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
