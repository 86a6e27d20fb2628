"""What doors, relays and heads do, piece by piece, on tables with millions of rows. Owns no clock
and no table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from shardline.contract.ids import new_id
from shardline.contract.job import FinishReason, JobRequest, JobState, Result, Usage
from shardline.store import dead_letters, jobs, listing, models, pipelines, progress
from shardline.store.connection.encoding import Key
from shardline_server.store import (
    claims,
    crashes,
    ends,
    growth,
    leases,
    outbox,
    preparation,
    retention,
    sweeps,
)
from shardline_server.store.claims import Claimant
from shardline_server.store.ends import End
from shardline_server.store.leases import Beat
from shardline_server.store.preparation import PreparedJob
from tests.benchmarks.scale_tables import MODEL, SEATS, TENANT

Work = Callable[[Connection], object]
BATCH = 256
IDS = tuple(range(100, 400))


def nothing(_connection: Connection) -> None:
    """Before work that needs no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Work that is timed, and what must have happened before it in the same transaction."""

    name: str
    work: Work
    before: Work = nothing


class Head:
    """A head's part of a job's life; each transaction is undone, so it begins with a claim."""

    def __init__(self, ids: list[UUID], epoch: int) -> None:
        self._ids = ids
        self.claimant = Claimant(
            worker="h", pipeline="p", epoch=epoch, fingerprint="w", exactness="x"
        )
        self.keys: list[Key] = []

    def claim(self, connection: Connection, *, lease_s: float = 3_600.0) -> None:
        """All of them."""
        claimed = claims.claim(
            connection, self._ids, self.claimant, lease_s=lease_s, exact_wait_s=60.0
        )
        self.keys = [(one.job_id, one.fence) for one in claimed]
        assert len(self.keys) == len(self._ids)

    def beat(self, connection: Connection, *, start: int = 0, num: int = 20) -> None:
        """With new tokens of each."""
        beats = [
            Beat(job_id=job_id, fence=fence, start=start, ids=IDS[:num])
            for job_id, fence in self.keys
        ]
        assert len(leases.heartbeat(connection, beats, lease_s=3_600.0)) == len(beats)

    def end(self, connection: Connection) -> None:
        """Each with its result."""
        assert len(ends.end_running(connection, [self._success(key) for key in self.keys])) == len(
            self.keys
        )

    def release(self, connection: Connection) -> None:
        """All of them."""
        assert len(ends.release_running(connection, self.keys)) == len(self.keys)

    def lose(self, connection: Connection, *, num_saved: int = 0, cancelled: bool = False) -> None:
        """Claimed, perhaps with tokens, perhaps to be cancelled; then nothing was heard any
        more."""
        self.claim(connection)
        if num_saved:
            self.beat(connection, num=num_saved)
        stop = ", cancel_requested_at = now()" if cancelled else ""
        change = f"UPDATE jobs SET lease_until = now() - interval '1 s' {stop} WHERE id = ANY(:ids)"
        connection.execute(text(change), {"ids": self._ids})

    def _success(self, key: Key) -> End:
        job_id, fence = key
        usage = Usage(prompt_tokens=2, completion_tokens=len(IDS))
        result = Result(
            job_id=job_id,
            text="text " * 300,
            token_ids=IDS,
            usage=usage,
            finish_reason=FinishReason.STOP,
            exact=True,
        )
        return End(job_id=job_id, fence=fence, state=JobState.SUCCEEDED, result=result)


def pieces(engine: Engine) -> Iterator[Piece]:
    """All of them: what is left out is in no loop and reads one row by its key."""
    with engine.connect() as connection:
        due = (
            "state = 'queued' AND model = :model AND not_before <= now() AND tenant_id = 'default'"
        )
        query = text(f"SELECT id FROM jobs WHERE {due} LIMIT :num")
        ids = list(connection.scalars(query, {"model": MODEL, "num": BATCH}))
        (last,) = connection.scalars(
            text("SELECT id FROM jobs WHERE fence = 1 AND tenant_id = 'default' LIMIT 1")
        )
        epoch = connection.scalar(text("SELECT epoch FROM pipelines WHERE id = 'p'")) or 0
    yield from _doors(ids, last)
    yield from _relays(ids, Head(ids, epoch))
    yield from _heads(ids[:SEATS], Head(ids[:SEATS], epoch))
    yield from _lists(last)


def _doors(ids: list[UUID], ended: UUID) -> Iterator[Piece]:
    keyed = [
        JobRequest(model=MODEL, prompt="text " * 12, idempotency_key=f"key {n}")
        for n in range(20_001, 20_001 + BATCH)
        if n % 10 and n % 400
    ]
    known = [JobRequest(model=MODEL, prompt="text " * 12, id=job_id) for job_id in ids]
    yield Piece(
        name=f"insert {BATCH}", work=lambda connection: jobs.insert_jobs(connection, _requests())
    )
    yield Piece(
        name=f"repeat {len(keyed)} by key",
        work=lambda connection: jobs.insert_jobs(connection, keyed),
    )
    yield Piece(
        name=f"repeat {BATCH} by id", work=lambda connection: jobs.insert_jobs(connection, known)
    )
    yield Piece(name="get one", work=lambda connection: jobs.get_job(connection, ended))
    yield Piece(name=f"get {BATCH}", work=lambda connection: jobs.get_jobs(connection, ids))
    yield Piece(name=f"which of {BATCH} ended", work=lambda connection: jobs.ended(connection, ids))
    asked = [progress.ProgressQuestion(job_id=job_id) for job_id in [ended, *ids]]
    yield Piece(
        name=f"progress of {BATCH + 1}",
        work=lambda connection: progress.read_progress(connection, asked),
    )
    yield Piece(
        name=f"cancel {BATCH}", work=lambda connection: jobs.request_cancel(connection, ids)
    )
    yield Piece(name="models and pipelines", work=_read_small)
    with_dead: list[UUID] = []

    def find_dead(connection: Connection) -> None:
        with_dead[:] = [listing.list_dead(connection, limit=1)[0].id]

    yield Piece(
        name="show dead",
        before=find_dead,
        work=lambda connection: dead_letters.get_dead(connection, *with_dead),
    )
    yield Piece(
        name="replay",
        before=find_dead,
        work=lambda connection: dead_letters.replay(connection, *with_dead),
    )


def _relays(ids: list[UUID], head: Head) -> Iterator[Piece]:
    def unprepared(connection: Connection) -> None:
        jobs.insert_jobs(connection, [request for _ in range(4) for request in _requests()])

    taken: list[PreparedJob] = []

    def take(connection: Connection) -> None:
        rows = preparation.take_unprepared(connection, lease_s=10.0)
        taken[:] = [
            PreparedJob(id=row.id, model=MODEL, prompt_ids=IDS, max_tokens=8, seed=None)
            for row in rows
        ]
        assert taken

    def insert_and_take(connection: Connection) -> None:
        unprepared(connection)
        take(connection)

    yield Piece(name="take unprepared", before=unprepared, work=take)
    yield Piece(
        name="mark prepared",
        before=insert_and_take,
        work=lambda connection: preparation.mark_if_unprepared(connection, taken),
    )
    stamp: Work = partial(outbox.stamp_due, resend_s=15.0)
    yield Piece(name="stamp an empty window", work=stamp)
    yield Piece(
        name="stamp a full window",
        before=lambda connection: [stamp(connection) for _ in range(20)],
        work=stamp,
    )
    yield Piece(name="stamp again what is lost", before=_lose_messages, work=stamp)
    yield Piece(
        name=f"unstamp {BATCH}",
        before=stamp,
        work=lambda connection: outbox.unstamp(connection, ids),
    )
    yield Piece(
        name="unstamp sent",
        before=lambda connection: [stamp(connection) for _ in range(20)],
        work=outbox.unstamp_sent,
    )
    sweep_queued: Work = partial(sweeps.sweep_stopped_queued, decode=lambda _: "text")
    sweep_leases: Work = partial(sweeps.sweep_expired_leases, decode=lambda _: "text", lease_s=0.0)
    yield Piece(name="sweep queued, none", work=sweep_queued)
    yield Piece(
        name=f"sweep queued, {BATCH} cancelled", before=partial(_stop, ids=ids), work=sweep_queued
    )
    yield Piece(name="sweep leases, none", work=sweep_leases)
    yield Piece(name=f"sweep leases, {BATCH} crashed", before=head.lose, work=sweep_leases)
    saved = partial(head.lose, num_saved=20)
    yield Piece(name=f"sweep leases, {BATCH} with tokens", before=saved, work=sweep_leases)
    partly = partial(head.lose, num_saved=20, cancelled=True)
    yield Piece(name=f"sweep leases, {BATCH} partial results", before=partly, work=sweep_leases)
    yield Piece(name="counts", work=sweeps.count_active)
    yield Piece(name="sizes", work=growth.sizes)
    yield Piece(name="number of dead letters", work=growth.num_dead)
    yield Piece(name="delete old", work=partial(retention.delete_old, age_s=86_400.0))


def _heads(ids: list[UUID], head: Head) -> Iterator[Piece]:
    names = [str(job_id) for job_id in ids]
    yield Piece(
        name=f"quarantined of {SEATS}",
        work=lambda connection: crashes.quarantined(connection, names),
    )
    yield Piece(name=f"claim {SEATS}", work=head.claim)
    yield Piece(
        name=f"postpone {SEATS}",
        work=lambda connection: claims.postpone_unfit(connection, ids, head.claimant, wait_s=1.0),
    )
    yield Piece(name=f"heartbeat {SEATS}", before=head.claim, work=head.beat)

    def claim_and_beat(connection: Connection) -> None:
        head.claim(connection)
        head.beat(connection)

    yield Piece(
        name=f"heartbeat {SEATS} again",
        before=claim_and_beat,
        work=partial(head.beat, start=20, num=20),
    )
    yield Piece(name=f"end {SEATS}", before=claim_and_beat, work=head.end)
    yield Piece(name=f"release {SEATS}", before=claim_and_beat, work=head.release)
    yield Piece(
        name=f"requeue or fail {SEATS}",
        before=head.claim,
        work=lambda connection: crashes.requeue_or_fail_held(connection, head.keys),
    )
    yield Piece(
        name=f"expire {SEATS}",
        before=head.claim,
        work=lambda connection: leases.expire_held_by(connection, worker="h", pipeline="p"),
    )


def _lists(last: UUID) -> Iterator[Piece]:
    """Each filter, its first page and the one after `last`."""
    for state, model, tenant, after in product(
        (None, *JobState), (None, MODEL, "rare"), (None, TENANT), (None, last)
    ):
        page = "first" if after is None else "next"
        yield Piece(
            name=f"list {state or 'all'}, {model or 'any'}, {tenant or 'any'}, {page}",
            work=partial(listing.list_jobs, state=state, model=model, tenant=tenant, after=after),
        )
    for model in (None, MODEL, "rare"):
        yield Piece(
            name=f"list dead, {model or 'any'}", work=partial(listing.list_dead, model=model)
        )


def _requests() -> list[JobRequest]:
    return [JobRequest(model=MODEL, prompt="text " * 12, id=new_id()) for _ in range(BATCH)]


def _read_small(connection: Connection) -> None:
    models.versions(connection)
    pipelines.live_pipelines(connection)
    pipelines.longest(connection)


def _stop(connection: Connection, ids: list[UUID]) -> None:
    connection.execute(
        text("UPDATE jobs SET cancel_requested_at = now() WHERE id = ANY(:ids)"), {"ids": ids}
    )


def _lose_messages(connection: Connection) -> None:
    outbox.stamp_due(connection, resend_s=15.0)
    lost = (
        "UPDATE jobs SET sent_at = now() - interval '1 day'"
        " WHERE state = 'queued' AND sent_at IS NOT NULL"
    )
    connection.execute(text(lost))
