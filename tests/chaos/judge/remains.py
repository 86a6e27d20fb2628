"""What a quiet stack still holds: KV in use. Asks the stages themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Celery

from shardline.base.config import Settings
from shardline.contract.queues import celery_settings
from tests.chaos.load.target import Target
from tests.chaos.report.finding import Finding
from tests.polling import within

QUIET_S = 60.0


def num_workers(target: Target, num_replicas: int = 1) -> int:
    """Stages of both models."""
    return target.num_stages * num_replicas + target.num_more_stages


def kv_in_use(target: Target, num_expected: int) -> dict[str, int]:
    """Each stage's own counter of KV blocks, by worker. Those that still load do not answer."""
    app = Celery("inspector", set_as_current=False)
    app.conf.update(celery_settings(Settings(redis_url=target.redis_url)))
    # Of its own: kombu's pool would give one that a fault has broken since the last look.
    with app.connection_for_write() as connection:
        inspect = app.control.inspect(timeout=5, limit=num_expected + 1, connection=connection)
        answers: Mapping[str, Any] = inspect._request("stage") or {}
    return {
        name: answer["kv_blocks_used"]
        for name, answer in answers.items()
        if "kv_blocks_used" in answer
    }


def kv_leaked(target: Target, *, num_replicas: int = 1) -> tuple[int, list[Finding]]:
    """I4: blocks in use though nothing runs; every stage must answer."""
    last: dict[str, int] = {}
    num_expected = num_workers(target, num_replicas)

    def is_free() -> bool:
        nonlocal last
        last = kv_in_use(target, num_expected)
        return len(last) == num_expected and not any(last.values())

    if within(QUIET_S, is_free):
        return 0, []
    num_leaked = sum(last.values())
    what = f"{len(last)} of {num_expected} stages answered: {last}"
    return num_leaked, [Finding(invariant="I4", count="kv_blocks_leaked", what=what)]
