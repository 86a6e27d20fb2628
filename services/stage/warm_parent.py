"""`python -m services.stage.warm_parent FD`: has imported what a stage needs, and forks stages of
itself on request.

A stage so begins with everything imported, and shares those pages with its siblings. The warm
parent starts no thread, opens no connection, takes no lock and computes nothing, because a fork
copies the memory of all threads and goes on with one. It knows no settings: a stage reads its own
after the fork. FD is its end of the supervisor's socket pair.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from services.stage import __main__ as stage
from services.stage.model.model_info import CACHE, ModelInfo
from shardline.base.errors import ShardlineError
from shardline_server.host.environment import take_environment
from shardline_server.host.fork_request import GO, READY, ForkRequest
from shardline_server.host.prctl import die_with_parent, name_process
from shardline_server.host.threads import num_threads

LATE_IMPORTS = (
    "celery.backends.base",
    "celery.worker.components",
    "celery.worker.consumer",
    "kombu.transport.redis",
)
"""What Celery finds by its name, and imports only when a worker starts."""
OWN_PACKAGES = frozenset(
    {
        "services",
        "shardline",
        "shardline_costs",
        "shardline_fleet",
        "shardline_gguf",
        "shardline_scheduler",
        "shardline_server",
    }
)
STDOUT = 1
STDERR = 2


def main() -> int:
    """Serves until the supervisor goes; in a new process, is a stage. Returns the exit status."""
    link = socket.socket(fileno=int(sys.argv[1]))
    supervisor = os.getppid()
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    import_model()
    # Objects of the imports live for ever. Collected or marked by a child, their pages would be its
    # own.
    gc.collect()
    gc.freeze()
    num_started = num_threads() - 1
    can_fork = num_started == 0
    link.send(
        READY
        if can_fork
        else f"its imports started {num_started} threads: see *_NUM_THREADS".encode()
    )
    imported = source_times()
    while (request := ForkRequest.receive(link)) is not None:
        # A stage imports more modules later: those of an upgrade would not fit the imported ones.
        if can_fork and source_times() == imported and fork(request, supervisor):
            link.close()
            return stage.main()
        request.close()
    return 0


def source_times() -> dict[str, int]:
    """Returns when the file of each imported module of ours was written, in nanoseconds; -1 for a
    file that is gone."""
    files = [
        Path(module.__file__)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in OWN_PACKAGES and module.__file__
    ]
    return {str(file): file.stat().st_mtime_ns if file.exists() else -1 for file in files}


def import_model() -> None:
    """Imports the modules of the model that the stages will load, if it is local: a hub is asked
    by stages only."""
    model = os.environ.get("SHARDLINE_MODEL", "")
    cache_folder = Path(os.environ.get("SHARDLINE_CACHE_DIR", CACHE))
    if Path(model).exists():
        with suppress(ShardlineError):  # A stage will report it.
            ModelInfo.read(model, cache_folder=cache_folder)


def fork(request: ForkRequest, supervisor: int) -> bool:
    """True in the new stage, a child of the supervisor; False here, whatever came of it.

    The child that is forked first forks the stage and ends at once: Linux then gives the stage to
    the supervisor, which adopts orphans. So the supervisor alone sees its end, and a stage outlives
    its warm parent.
    """
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        if os.fork() > 0:
            os._exit(0)
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)
        become(request, supervisor)
        return True
    os.waitpid(first, 0)
    # Closed only now: the stage goes on when it has its new parent.
    os.close(reader)
    os.close(writer)
    return False


def become(request: ForkRequest, supervisor: int) -> None:
    """Turns this fork into the stage that was asked for, or ends it if no supervisor waits for it
    any more."""
    die_with_parent()
    os.setsid()
    os.dup2(request.log, STDOUT)
    os.dup2(request.log, STDERR)
    name_process(request.name)
    take_environment(dict(request.environment))
    with socket.socket(fileno=os.dup(request.answer)) as answer:
        request.close()
        # A supervisor that ended before die_with_parent has not taken this process along.
        if os.getppid() != supervisor:
            os._exit(1)
        answer.send(str(os.getpid()).encode())
        if answer.recv(len(GO)) != GO:
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
