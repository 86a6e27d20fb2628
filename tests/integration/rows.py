"""What the store's and the relay's tests share: one model, one head, and jobs in any state. Knows
no service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from shardline.contract.job import FinishReason, JobRequest, JobState, Result, Usage
from shardline.store import jobs, models, pipelines
from shardline.store.connection.database import connect
from shardline_server.store import claims, ends
from shardline_server.store.claims import Claimant, ClaimedJob
from shardline_server.store.ends import End
from tests.polling import until

MODEL = "m"
LONG_S = 3600.0
HEAD = Claimant(worker="h", pipeline="p", epoch=1, fingerprint="w", exactness="x")


@contextmanager
def database_with_head(database_url: str) -> Iterator[Engine]:
    """An engine on a database that knows MODEL and a head `p` in epoch 1."""
    engine = connect(database_url, pool_size=16)
    try:
        with engine.begin() as connection:
            models.register_model(connection, model_row(MODEL))
            pipelines.take_epoch(
                connection, "p", model=MODEL, fingerprint="w", head="h", lease_s=LONG_S
            )
            pipelines.ready(
                connection, "p", 1, seats=4, stages=[{"worker": "h"}], exact=True, kv_tokens=4096
            )
        yield engine
    finally:
        engine.dispose()


def model_row(name: str) -> dict[str, Any]:
    """A model that takes token ids only."""
    return {
        "name": name,
        "context_length": 32,
        "vocab_size": 100,
        "eos_token_ids": [1],
        "tokenizer": "",
        "special_tokens": {},
        "fingerprint": "w",
    }


def request(**fields: Any) -> JobRequest:
    """A valid request of MODEL."""
    return JobRequest(**{"model": MODEL, "prompt": "text", **fields})


def submit(engine: Engine, num: int = 1, **fields: Any) -> list[UUID]:
    """Prepared jobs, as a door commits them."""
    with engine.begin() as connection:
        stored = jobs.insert_jobs(
            connection, [request(**fields)] * num, prepared=[((5, 6), 8)] * num
        )
    return [one.job_id for one in stored]


def claim(
    engine: Engine, ids: list[UUID], *, head: Claimant = HEAD, **values: Any
) -> list[ClaimedJob]:
    """By head `p`, with a lease that outlives the test unless told."""
    times = {"lease_s": LONG_S, "exact_wait_s": LONG_S}
    with engine.begin() as connection:
        return claims.claim(connection, ids, head, **{**times, **values})


def claim_one(engine: Engine, job_id: UUID, **values: Any) -> ClaimedJob:
    """Beside a relay: claims skip a row while another transaction has it locked."""
    (claimed,) = until(lambda: claim(engine, [job_id], **values))
    return claimed


def running(engine: Engine, **values: Any) -> ClaimedJob:
    """One job, submitted and claimed."""
    (job_id,) = submit(engine)
    return claim_one(engine, job_id, **values)


def success(claimed: ClaimedJob, *ids: int) -> End:
    """The end that a head writes."""
    result = Result(
        job_id=claimed.job_id,
        text="done",
        token_ids=ids or (7, 8),
        usage=Usage(prompt_tokens=2, completion_tokens=len(ids) or 2),
        finish_reason=FinishReason.STOP,
        exact=True,
        timings={"queued_s": 0.5},
        provenance={"worker": "h"},
    )
    return End(job_id=claimed.job_id, fence=claimed.fence, state=JobState.SUCCEEDED, result=result)


def end(engine: Engine, *each: End) -> dict[UUID, JobState]:
    """In a transaction of its own."""
    with engine.begin() as connection:
        return ends.end_running(connection, each)


def end_one(engine: Engine, last: End) -> None:
    """Beside a relay: ends skip a row while another transaction has it locked."""
    until(lambda: end(engine, last)[last.job_id] is last.state)


def release(engine: Engine, claimed: ClaimedJob) -> bool:
    """Give one job back."""
    with engine.begin() as connection:
        return bool(ends.release_running(connection, [(claimed.job_id, claimed.fence)]))


def state(engine: Engine, job_id: UUID) -> JobState:
    """The committed state."""
    with engine.begin() as connection:
        job = jobs.get_job(connection, job_id)
        assert job is not None
        return job.state


def cell(engine: Engine, query: str, **values: Any) -> Any:
    """The one value that a query gives."""
    with engine.begin() as connection:
        return connection.execute(text(query), values).scalar_one()


def num_blocked(database: Engine) -> int:
    """Statements that wait for another transaction's lock."""
    return int(
        cell(database, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    )


def change(engine: Engine, statement: str, **values: Any) -> None:
    """Bring rows into a state by hand."""
    with engine.begin() as connection:
        connection.execute(text(statement), values)


def pass_time(connection: Connection, job_id: UUID, column: str) -> None:
    """Move one of a job's times an hour back: tests do not wait."""
    connection.execute(
        text(f"UPDATE jobs SET {column} = now() - interval '1 hour' WHERE id = :id"), {"id": job_id}
    )
