"""What a supervisor and the warm parent of its stages send each other, over a socket pair that no
other process can open.

The supervisor sends a ForkRequest with two files: the stage's log, and one end of a socket pair on
which the new stage sends its pid and waits for GO. Knows neither of the two.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

READY = b"ready"
"""The warm parent's first message. Any other one tells why it cannot fork."""
GO = b"go"
"""To the new stage: its pid is known. It ends if it hears anything else."""
MAX_BYTES = 1 << 20
"""Of one message. Linux takes less by default (208 KiB), and then the supervisor gets an
OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """A stage to fork. Its receiver owns both files."""

    name: str
    environment: Mapping[str, str]
    log: int
    answer: int

    def send(self, link: socket.socket) -> None:
        """One message over a SOCK_SEQPACKET socket. Raises OSError, also for an environment that is
        too large."""
        # Not msgspec: a variable may hold bytes that are no UTF-8, which Python keeps as lone
        # surrogates.
        message = json.dumps([self.name, dict(self.environment)]).encode()
        socket.send_fds(link, [message], [self.log, self.answer])

    @classmethod
    def receive(cls, link: socket.socket) -> Self | None:
        """The next request; None when the supervisor has gone. Raises OSError."""
        message, files, _, _ = socket.recv_fds(link, MAX_BYTES, 2)
        if not message:
            return None
        name, environment = json.loads(message)
        log, answer = files
        return cls(name=name, environment=environment, log=log, answer=answer)

    def close(self) -> None:
        """Close both files."""
        os.close(self.log)
        os.close(self.answer)
