"""The claimed jobs of a head. Owns the set; knows no statement."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from services.stage.jobs.job_engine import JobEngine
from services.stage.jobs.live_job import LiveJob
from shardline_scheduler.sequence import Key


class LiveJobs(Collection[LiveJob]):
    """Changed by the lease manager's thread alone; any thread may look a job up or iterate over a
    copy."""

    def __init__(self, engine: JobEngine) -> None:
        self._engine = engine
        self._jobs: dict[Key, LiveJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[LiveJob]:
        return iter(list(self._jobs.values()))

    def __contains__(self, job: object) -> bool:
        return isinstance(job, LiveJob) and self._jobs.get(job.key) is job

    def get(self, key: Key) -> LiveJob | None:
        """The live job of this attempt."""
        return self._jobs.get(key)

    def select(self, keys: Iterable[Key]) -> list[LiveJob]:
        """Those of the attempts that are live, in their order."""
        return [job for key in keys if (job := self._jobs.get(key)) is not None]

    def add(self, job: LiveJob) -> None:
        """A claim was committed."""
        self._jobs[job.key] = job

    def remove(self, key: Key) -> LiveJob:
        """The engine has ended this attempt. Raises KeyError."""
        return self._jobs.pop(key)

    def drop(self, job: LiveJob) -> None:
        """The claim is lost or given back: the engine forgets the job, Celery hears nothing of
        it."""
        del self._jobs[job.key]
        self._engine.forget(job.key)
        job.delivery.drop()
