"""What a quiet stack still holds: KV in use, memory, Redis. Asks the stages and the servers themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import redis
from celery import Celery
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from shardline import keys
from shardline.config import Settings
from shardline.queues import celery_settings
from tests.faults.checker import Finding
from tests.faults.target import Target

QUIET_S = 60.0
REDIS_MAX_BYTES = 64 << 20
RSS_GROWTH_MAX_MB = 512
MIB = 1 << 20


def kv_in_use(world: Target) -> dict[str, int]:
    """Each stage's own counter of KV blocks, by worker."""
    app = Celery("inspector", set_as_current=False)
    app.conf.update(celery_settings(Settings(redis_url=world.redis_url)))
    answers: Mapping[str, Any] = app.control.inspect(timeout=5, limit=world.num_stages + 1)._request("stage") or {}
    return {name: answer["kv_blocks_used"] for name, answer in answers.items() if "kv_blocks_used" in answer}


def kv_leaked(world: Target) -> tuple[int, list[Finding]]:
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


def unbounded(world: Target, growth_mb: float) -> list[Finding]:
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


def within(timeout_s: float, condition: Callable[[], bool]) -> bool:
    """Whether it holds in time."""
    retrying = Retrying(
        wait=wait_fixed(0.2),
        stop=stop_after_delay(timeout_s),
        retry=retry_if_result(lambda holds: not holds),
        retry_error_callback=lambda _: False,
    )
    return bool(retrying(condition))
