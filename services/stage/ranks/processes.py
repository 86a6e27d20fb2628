"""The other ranks of a stage, as its first one starts and watches them: one process each, on its
own cores.

A stage lives as long as all of its ranks: none can go on without the others, so the end of one is
the end of all. Ranks are forks of their stage, which has imported what they need, as long as it has
one thread; else new programs.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import structlog

from services.stage.ranks.group import RankGroup
from services.stage.ranks.messages import Message, encode
from shardline_server.host.threads import die, num_threads

log = structlog.get_logger(__name__)

PROGRAM = "services.stage.rank"
REFUSED_STATUS = 2
"""Exit status of a rank that refuses what it should load; it has reported why."""
STDIN = 0
STDERR = 2
STOP_S = 5.0
"""A rank that has not ended so long after its link was closed is killed."""


Wait = Callable[[], int]
"""Returns a process's exit status at its end, or the signal that ended it, negative. Called
once."""


class RankProcess(NamedTuple):
    """Another rank, as this process has started it."""

    pid: int
    link: Connection
    wait: Wait


class OtherRanks:
    """The processes of ranks 1 and up. `post` is called by one thread."""

    def __init__(self, group: RankGroup, started: Sequence[RankProcess]) -> None:
        self.group = group
        self.numbers = count()
        """Of loaded shards."""
        self.pids = [each.pid for each in started]
        """Of the other ranks, in order."""
        self._closing = False
        self._links = [each.link for each in started]
        self._watches = [
            threading.Thread(
                target=self._watch,
                args=(rank, each.wait),
                name="rank-watch",
                daemon=True,
            )
            for rank, each in enumerate(started, start=1)
        ]

    def watch(self) -> None:
        """Ends this process, from now on, when one of them ends."""
        for watch in self._watches:
            watch.start()

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
        for pid, watch in zip(self.pids, self._watches, strict=True):
            watch.join(STOP_S)
            if watch.is_alive():
                os.kill(pid, signal.SIGKILL)

    def _watch(self, rank: int, wait: Wait) -> None:
        status = wait()
        if self._closing:
            return
        if status == REFUSED_STATUS:
            os._exit(REFUSED_STATUS)
        die(f"rank {rank} of this stage has ended with status {status}")


def start_ranks(cores: Sequence[tuple[int, ...]]) -> OtherRanks:
    """Starts a rank for each of these sets of cores; this process stays rank 0. The
    ranks end with the thread that calls this."""
    memory = os.memfd_create("shardline-ranks")
    num_ranks = len(cores) + 1
    started = [_start(rank, own, num_ranks, memory) for rank, own in enumerate(cores, start=1)]
    ranks = OtherRanks(RankGroup(0, num_ranks, memory), started)
    ranks.watch()  # Only now: what has a second thread cannot fork.
    return ranks


def _start(rank: int, cores: tuple[int, ...], num_ranks: int, memory: int) -> RankProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        numbers = (os.getpid(), rank, num_ranks, theirs.fileno(), memory)
        arguments = [*map(str, numbers), ",".join(map(str, cores))]
        start = _fork if num_threads() == 1 else _start_new
        pid, wait = start(arguments, {theirs.fileno(), memory})
    return RankProcess(pid, Connection(ours.detach()), wait)


def _start_new(arguments: list[str], files: set[int]) -> tuple[int, Wait]:
    """Starts the program with these open files. Returns its pid and how to wait for it."""
    log.info("ranks start as new programs", threads_of_this_stage=num_threads())
    argv = [sys.executable, "-m", PROGRAM, *arguments]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=files)
    return process.pid, process.wait


def _fork(arguments: list[str], files: set[int]) -> tuple[int, Wait]:
    """The same, and quick: a fork of this process, which must have one thread, goes on as the
    program."""
    pid = os.fork()
    if pid == 0:
        os._exit(_become(arguments, files))
    return pid, partial(_status_of, pid)


def _status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _become(arguments: list[str], files: set[int]) -> int:
    """Runs the program in this fork, with these open files and the standard ones alone. Returns its
    exit status."""
    # Never collected here: objects of the stage would close files by numbers that are others' then.
    gc.freeze()
    for file in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        if file > STDERR and file not in files:
            with suppress(OSError):  # the listing's own
                os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), STDIN)
    sys.argv[1:] = arguments
    try:
        runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return int(end.code or 0)
    except Exception:
        log.exception("a rank failed")
    return 1
