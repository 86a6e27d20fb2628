"""Heartbeats: every lease renewed and new tokens saved in one statement. Owns when a hung engine's
leases run out.

Knows no end.
"""

from __future__ import annotations

import structlog
from sqlalchemy import Engine as Database

from services.stage.jobs.checkpoints import beats_of
from services.stage.jobs.delta_publisher import DeltaPublisher
from services.stage.jobs.job_engine import JobEngine
from services.stage.jobs.live_job import LiveJob
from services.stage.jobs.live_jobs import LiveJobs
from services.stage.jobs.quarantine import ClaimContext
from services.stage.jobs.readiness import PipelineReadiness
from shardline.base.clock import lease_clock_s, monotonic_s
from shardline.base.config import Times
from shardline.contract.job import FinishReason
from shardline_server.failpoints import Point, failpoint
from shardline_server.store import claims, leases

log = structlog.get_logger(__name__)


class Heartbeater:
    """Runs in the lease manager's thread."""

    def __init__(
        self,
        *,
        database: Database,
        engine: JobEngine,
        jobs: LiveJobs,
        publisher: DeltaPublisher,
        readiness: PipelineReadiness,
        times: Times,
    ) -> None:
        self._database = database
        self._engine = engine
        self._jobs = jobs
        self._publisher = publisher
        self._readiness = readiness
        self._times = times
        self._next_beat_s = 0.0
        self._last_step = -1
        self._last_move_s = monotonic_s()

    @property
    def wait_s(self) -> float:
        """Returns the seconds until the next heartbeat is due."""
        return max(0.0, self._next_beat_s - monotonic_s())

    def hasten(self) -> None:
        """The next heartbeat is due now."""
        self._next_beat_s = 0.0

    def postpone(self) -> None:
        """The next heartbeat is due in one interval."""
        self._next_beat_s = monotonic_s() + self._times.heartbeat_s

    def claim_context(self) -> ClaimContext:
        """What decisions about quarantine are made on."""
        now_s = monotonic_s()
        heartbeat_s = self._times.heartbeat_s
        return ClaimContext(
            live=self._jobs,
            now_s=now_s,
            heartbeat_s=heartbeat_s,
            num_steps=self._engine.num_steps,
            is_moving=now_s - self._last_move_s < 1.5 * heartbeat_s,
        )

    def beat(self) -> None:
        """Renews the leases and saves new tokens. A hung engine's leases are left to run out."""
        sent_s = lease_clock_s()
        self._readiness.renew()
        if not self._jobs:
            self._engine.extend_lease(sent_s + self._times.fence_s)
            return
        if self._is_hung():
            return
        jobs = list(self._jobs)
        beats = beats_of(jobs)
        with self._database.begin() as connection:
            replies = leases.heartbeat(connection, beats, lease_s=self._times.lease_s)
            failpoint(Point.HEARTBEAT_BEFORE_COMMIT)
        failpoint(
            Point.HEARTBEAT_AFTER_COMMIT, saves="tokens" if any(beat.ids for beat in beats) else ""
        )
        for job, beat in zip(jobs, beats, strict=True):
            reply = replies.get((beat.job_id, beat.fence))
            if reply is None:
                self._jobs.drop(job)
                continue
            job.is_held_up = not reply.renewed
            if job.is_held_up:
                continue
            job.lease_ends_s = sent_s + self._times.fence_s
            self._saved(job, beat.start + len(beat.ids))
            if reply.cancel_requested or reply.expired:
                self._engine.end(
                    job.key,
                    FinishReason.CANCELLED if reply.cancel_requested else FinishReason.EXPIRED,
                )
        dropped = self._drop_held_up(sent_s)
        ends_s = min((job.lease_ends_s for job in self._jobs), default=sent_s + self._times.fence_s)
        self._engine.extend_lease(ends_s)
        # What their lock costs them is no crash of theirs; what an engine that broke does is.
        if innocent := [job.attempt for job in dropped if not job.broken_epoch]:
            with self._database.begin() as connection:
                claims.park(connection, innocent)

    def _drop_held_up(self, sent_s: float) -> list[LiveJob]:
        """Drops jobs without a renewed lease, before they would stop all others. Another
        transaction has their rows locked: a relay requeues them once it ends."""
        held_up = [
            job for job in self._jobs if job.lease_ends_s < sent_s + 2 * self._times.heartbeat_s
        ]
        for job in held_up:
            log.warning(
                "an open transaction keeps a running job locked: it goes on once that ends",
                job_id=str(job.job_id),
                fence=job.claimed.fence,
            )
            self._jobs.drop(job)
        return held_up

    def _saved(self, job: LiveJob, num_saved: int) -> None:
        if job.is_quarantined and num_saved > job.num_saved:
            self._engine.release(job.key)
        job.num_saved = num_saved
        if num_saved == len(job.ids):
            self._publisher.deltas(job.job_id, job.take_held())

    def _is_hung(self) -> bool:
        """No step was made for longer than a stall of every stage. An engine that is fenced or has
        no pipeline makes none either, and is not hung."""
        num_steps = self._engine.num_steps
        now_s = monotonic_s()
        if num_steps != self._last_step or self._engine.is_fenced or self._readiness.is_recovering:
            self._last_step = num_steps
            self._last_move_s = now_s
        return now_s - self._last_move_s > self._times.stall_s * self._readiness.num_stages
