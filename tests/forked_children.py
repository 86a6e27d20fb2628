"""What a supervisor starts with `python -m` is a fork of a nursery, a process that has imported
what all of them import. Each is the supervisor's child, in a session of its own, and ends with it,
as what `services.standalone.processes.spawn` starts.

The nursery has one thread and forks twice: the first child ends at once, and Linux gives the second
to the supervisor, which adopts orphans.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.standalone import processes, warm_parent
from services.standalone.adopted import AdoptedProcess
from services.standalone.processes import open_log
from shardline_server import failpoints
from shardline_server.host.environment import take_environment
from shardline_server.host.prctl import adopt_orphans, die_with_parent
from tests.repository import REPOSITORY

MAX_BYTES = 1 << 20
MAX_FILES = 8
STDERR = 2
SPAWN = processes.spawn


def fork_children() -> None:
    """Makes this process, a supervisor that has started nothing yet, fork what it starts."""
    adopt_orphans()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        die_with_parent()
        _close_all_but(theirs.fileno())
        _serve(theirs, os.getppid())
    theirs.close()

    def spawn(
        argv: Sequence[str], *, log: Path, pass_fds: Sequence[int] = (), **options: Any
    ) -> subprocess.Popen[bytes] | AdoptedProcess:
        if list(argv[:2]) != [sys.executable, "-m"]:
            return SPAWN(argv, log=log, pass_fds=pass_fds, **options)
        environment = dict(os.environ) if options.get("env") is None else options["env"]
        return AdoptedProcess(_ask(ours, argv[2:], environment, log, pass_fds))

    for module in (processes, warm_parent):
        vars(module)["spawn"] = spawn


def run_module(argv: Sequence[str]) -> None:
    """Runs `python -m MODULE ARGUMENT…` in this fork, to its end. Raises SystemExit."""
    failpoints.ARMED = failpoints._from_environment()
    os.chdir(REPOSITORY)
    module, *arguments = argv
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:  # as the interpreter does at its end
        threading._shutdown()  # type: ignore[attr-defined]  # it has no public name
        atexit._run_exitfuncs()


def _ask(
    link: socket.socket,
    argv: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    files: Sequence[int],
) -> int:
    """The pid of the new process."""
    answer, theirs = socket.socketpair()
    with answer, open_log(log) as output:
        with theirs:
            message = json.dumps([list(argv), dict(environment), list(files)]).encode()
            socket.send_fds(link, [message], [output.fileno(), theirs.fileno(), *files])
        return int(answer.recv(16))


def _serve(link: socket.socket, supervisor: int) -> None:
    """The nursery, until the supervisor goes. Does not return."""
    while True:
        message, received, _, _ = socket.recv_fds(link, MAX_BYTES, MAX_FILES)
        if not message:
            os._exit(0)
        argv, environment, numbers = json.loads(message)
        log, answer, *files = received
        if _is_orphan(supervisor):
            status = 1
            try:
                _become(environment, log, answer, dict(zip(numbers, files, strict=True)))
                status = _status_of(argv)
            finally:
                os._exit(status)
        for each in received:
            os.close(each)


def _is_orphan(supervisor: int) -> bool:
    """True in the new child of the supervisor, False here."""
    reader, writer = os.pipe()
    first = os.fork()
    if first > 0:
        os.waitpid(first, 0)
        os.close(reader)
        os.close(writer)
        return False
    if os.fork() > 0:
        os._exit(0)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    if os.getppid() != supervisor:
        os._exit(1)
    return True


def _become(
    environment: Mapping[str, str], log: int, answer: int, files: Mapping[int, int]
) -> None:
    """Takes the place of what `subprocess.Popen` would start: `files` maps the numbers that the
    program knows to those received."""
    die_with_parent()
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, STDERR)
    os.write(answer, str(os.getpid()).encode())
    for number, file in files.items():
        os.dup2(file, number)
    _close_all_but(*files)
    take_environment(environment)


def _status_of(argv: Sequence[str]) -> int:
    """Runs the program. Returns its exit status, as the interpreter has it."""
    try:
        run_module(argv)
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:  # noqa: BLE001 (as the interpreter does)
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _close_all_but(*kept: int) -> None:
    # Never collected here: objects of the parent would close files by numbers of others.
    gc.freeze()
    for file in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        if file > STDERR and file not in kept:
            with suppress(OSError):  # the listing's own
                os.close(file)
