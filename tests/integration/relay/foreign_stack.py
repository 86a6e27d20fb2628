"""A relay, a played head and the worker of another team's Celery app, on real servers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from celery import Celery
from sqlalchemy import text

from shardline.contract.job import JobState
from shardline_server.store.ends import End
from tests.forked import ForkedProgram
from tests.integration.relay import foreign_app
from tests.integration.relay.foreign_app import CALLS
from tests.integration.relay.relay_stack import PATIENCE_S, RelayStack, relay_stack
from tests.integration.rows import cell, claim_one, end_one, success
from tests.polling import until


@dataclass(slots=True, kw_only=True)
class ForeignStack:
    """`app` is the foreign one, in this process, as a producer."""

    relays: RelayStack
    app: Celery
    worker: ForkedProgram

    def calls(self) -> list[list[Any]]:
        """What the foreign tasks were called with so far."""
        found: Any = self.relays.redis.lrange(CALLS, 0, -1)
        return [json.loads(call) for call in found]

    def wait_for_calls(self, num: int) -> list[list[Any]]:
        """At least so many, in the order in which they came."""
        until(lambda: len(self.calls()) >= num, timeout_s=PATIENCE_S)
        return self.calls()

    def wait_until_settled(self) -> None:
        """Relays have nothing left to do for any task that is here, and the foreign worker has
        taken all."""
        query = "SELECT count(*) FROM celery_tasks WHERE settled_at IS NULL AND job_id IS NOT NULL"
        until(lambda: cell(self.relays.engine, query) == 0, timeout_s=PATIENCE_S)
        until(lambda: self.relays.redis.llen("celery") == 0, timeout_s=PATIENCE_S)
        self.app.send_task("foreign.say", ["done"]).get(timeout=PATIENCE_S)

    def end_leases(self) -> None:
        """The tasks that a dead relay has taken are due now, as they are when its leases have run
        out."""
        with self.relays.engine.begin() as connection:
            connection.execute(
                text("UPDATE celery_tasks SET due_at = now() WHERE settled_at IS NULL")
            )

    def complete(self, num: int = 1) -> list[UUID]:
        """The next jobs are claimed, as a head does, and succeed."""
        return [self._end(JobState.SUCCEEDED) for _ in range(num)]

    def fail_next(self) -> UUID:
        """The next job is claimed and fails."""
        return self._end(JobState.FAILED)

    def _end(self, state: JobState) -> UUID:
        (sent,) = self.relays.take_messages(1)
        return self.finish(UUID(sent), state)

    def finish(self, job_id: UUID, state: JobState = JobState.SUCCEEDED) -> UUID:
        """A job that was sent is claimed and ends."""
        claimed = claim_one(self.relays.engine, job_id)
        failure = End(
            job_id=claimed.job_id,
            fence=claimed.fence,
            state=state,
            error={"code": "engine", "problem": "it broke"},
        )
        end_one(self.relays.engine, success(claimed) if state is JobState.SUCCEEDED else failure)
        return claimed.job_id


@contextmanager
def foreign_stack(
    database_url: str,
    redis_url: str,
    folder: Path,
    *,
    backend: str | None,
    foreign_backend: str,
    **variables: str,
) -> Iterator[ForeignStack]:
    """`backend` is the relays'; the foreign app's may be another way to the same. Without a
    relay."""
    environment = {**os.environ, "FOREIGN_BROKER": redis_url, "FOREIGN_BACKEND": foreign_backend}
    with (
        relay_stack(database_url, redis_url, folder) as relays,
    ):
        relays.variables |= {"SHARDLINE_RESULT_BACKEND": backend or "", **variables}
        app = Celery(
            "foreign-producer", broker=redis_url, backend=foreign_backend, set_as_current=False
        )
        command = f"celery -A {foreign_app.__name__} worker -P threads -c 4"
        worker = ForkedProgram(
            [*command.split(), "--without-gossip", "--without-mingle"],
            environment=environment,
            log=folder / "foreign.log",
        )
        try:
            yield ForeignStack(relays=relays, app=app, worker=worker)
        finally:
            worker.kill()
            worker.wait(PATIENCE_S)
            app.close()
