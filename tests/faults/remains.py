"""What a stack holds and leaves: KV in use, processes, memory, Redis. Asks the system and the servers themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import redis
from celery import Celery
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from shardline import keys
from shardline.config import Settings
from shardline.queues import celery_settings
from tests.faults.checker import Finding
from tests.faults.world import World

QUIET_S = 60.0
REDIS_MAX_BYTES = 64 << 20
RSS_GROWTH_MAX_MB = 512
MIB = 1 << 20


def kv_in_use(world: World) -> dict[str, int]:
    """Each stage's own counter of KV blocks, by worker."""
    app = Celery("inspector", set_as_current=False)
    app.conf.update(celery_settings(Settings(redis_url=world.redis_url)))
    answers: Mapping[str, Any] = app.control.inspect(timeout=5, limit=world.num_stages + 1)._request("stage") or {}
    return {name: answer["kv_blocks_used"] for name, answer in answers.items() if "kv_blocks_used" in answer}


def kv_leaked(world: World) -> tuple[int, list[Finding]]:
    """I4: blocks in use though nothing runs; every stage must answer."""
    last: dict[str, int] = {}

    def is_free() -> bool:
        nonlocal last
        last = kv_in_use(world)
        return len(last) == world.num_stages and not any(last.values())

    if within(QUIET_S, is_free):
        return 0, []
    num_leaked = sum(last.values())
    what = f"{len(last)} of {world.num_stages} stages answered: {last}"
    return num_leaked, [Finding(invariant="I4", count="kv_blocks_leaked", what=what)]


def rss_mb(world: World) -> float:
    """Resident memory of all services."""
    return sum(psutil.Process(pid).memory_info().rss for pid in world.pids().values()) / MIB


def unbounded(world: World, growth_mb: float) -> list[Finding]:
    """I6: memory of the services, of Redis, and its streams."""
    found = []
    if growth_mb > RSS_GROWTH_MAX_MB:
        found.append(f"services grew by {growth_mb:.0f} MiB")
    with redis.Redis.from_url(world.redis_url, decode_responses=True) as client:
        used_bytes = int(client.info("memory")["used_memory"])
        if used_bytes > REDIS_MAX_BYTES:
            found.append(f"Redis holds {used_bytes / MIB:.0f} MiB")
        if not within(QUIET_S, lambda: client.xlen(keys.INTAKE) == 0):
            found.append(f"{client.xlen(keys.INTAKE)} entries are left in {keys.INTAKE}")
        endless = [key for key in client.scan_iter(keys.job_stream("*")) if client.ttl(key) == -1]
        if endless:
            found.append(f"{len(endless)} streams never expire, such as {endless[0]}")
    return [Finding(invariant="I6", count="growth", what=what) for what in found]


def family(world: World) -> set[psutil.Process]:
    """Every process that the stack has, with its children, and those that it had when it started."""
    own = [psutil.Process(pid) for pid in world.pids().values()]
    return {*world.stack.seen, *own, *(child for process in own for child in process.children(recursive=True))}


def orphans(folder: Path, seen: set[psutil.Process]) -> list[Finding]:
    """I5: processes ever seen, or with this stack's folder in their environment, that live on."""
    left = {process for process in seen if process.is_running() and process.status() != psutil.STATUS_ZOMBIE}
    left |= {process for process in psutil.process_iter() if _is_of(process, folder)}
    return [Finding(invariant="I5", count="orphans", what=f"process {process} lives on") for process in left]


def _is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get("SHARDLINE_HOME") == str(folder)
    except psutil.Error:
        return False


def within(timeout_s: float, condition: Callable[[], bool]) -> bool:
    """Whether it holds in time."""
    retrying = Retrying(
        wait=wait_fixed(0.2),
        stop=stop_after_delay(timeout_s),
        retry=retry_if_result(lambda holds: not holds),
        retry_error_callback=lambda _: False,
    )
    return bool(retrying(condition))
