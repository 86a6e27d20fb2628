"""The head's thread for Celery's result backend: what one result does to it, no other feels."""

from __future__ import annotations

from typing import Any

from services.stage.jobs.result_publisher import MAX_WAITING, ResultPublisher
from shardline.contract.job import JobState


class Backend:
    """Refuses what is poisoned."""

    def __init__(self) -> None:
        self.stored: list[str] = []

    def store(
        self,
        job_id: str,
        state: JobState,  # noqa: ARG002 (StoreResult's)
        value: Any,
    ) -> None:
        if value == "poison":
            raise ValueError("Exception information must include the exception type")
        self.stored.append(job_id)


def test_a_result_that_cannot_be_stored_is_dropped_alone() -> None:
    backend = Backend()
    publisher = ResultPublisher(backend.store)
    for job_id, value in (("one", "text"), ("two", "poison"), ("three", "text")):
        publisher.put(job_id, JobState.SUCCEEDED, value)
    publisher.stop()
    publisher.run()
    assert backend.stored == ["one", "three"]


def test_of_more_results_than_fit_the_newest_wait() -> None:
    backend = Backend()
    publisher = ResultPublisher(backend.store)
    for number in range(MAX_WAITING + 2):
        publisher.put(str(number), JobState.SUCCEEDED, "text")
    publisher.stop()
    publisher.run()
    assert backend.stored[0] == "2"
    assert len(backend.stored) == MAX_WAITING
