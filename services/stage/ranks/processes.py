"""The other ranks of a stage, as its first one starts and watches them: one process each, on cores of its own.

A stage lives as long as all of its ranks: none can go on without the others, so the end of one is the end of all.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import count
from multiprocessing.connection import Connection

from services.stage.ranks.group import RankGroup
from services.stage.ranks.messages import Message, encode
from shardline.threads import die

PROGRAM = "services.stage.rank"
REFUSED_STATUS = 2
"""Exit status of a rank that refuses what it should load; it has said why."""
STOP_S = 5.0
"""A rank that has not ended so long after its link was closed is killed."""


class OtherRanks:
    """The processes of ranks 1 and up. `post` is called by one thread."""

    def __init__(self, cores: Sequence[tuple[int, ...]]) -> None:
        """Starts a rank for each of these sets of cores. The ranks end with the thread that calls this."""
        memory = os.memfd_create("shardline-ranks")
        self.group = RankGroup(0, len(cores) + 1, memory)
        self.numbers = count()
        """Of loaded shards."""
        self._closing = False
        self._links: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank, own in enumerate(cores, start=1):
            self._start(rank, own, memory)

    @property
    def pids(self) -> list[int]:
        """Of the other ranks, in order."""
        return [process.pid for process in self._processes]

    def post(self, message: Message) -> None:
        """Sends it to every other rank."""
        data = encode(message)
        for link in self._links:
            link.send_bytes(data)

    def close(self) -> None:
        """Ends the other ranks."""
        self._closing = True
        while self._links:
            self._links.pop().close()
        for process in self._processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, rank: int, cores: tuple[int, ...], memory: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            place = [str(number) for number in (os.getpid(), rank, self.group.num_ranks, theirs.fileno(), memory)]
            process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, *place, ",".join(map(str, cores))],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), memory),
            )
        self._links.append(Connection(ours.detach()))
        self._processes.append(process)
        threading.Thread(target=self._watch, args=(rank, process), name="rank-watch", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if self._closing:
            return
        if status == REFUSED_STATUS:
            os._exit(REFUSED_STATUS)
        die(f"rank {rank} of this stage has ended with status {status}")
