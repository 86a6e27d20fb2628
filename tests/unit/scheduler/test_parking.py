"""Jobs without room for their KV: parked until Postgres knows that they begin, in their order, and
never for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

from services.stage.jobs.live_job import LiveJob
from services.stage.jobs.quarantine import without_room
from shardline_scheduler.events import MayBegin
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.sequence import MAX_OVERTAKEN
from shardline_server.store.claims import ClaimedJob
from tests.simulation.pipeline import Pipeline, config, decoding, expected_output, request


def test_a_parked_job_is_called_once_and_runs_only_after_it_began() -> None:
    pipeline = Pipeline(config())
    job = request(max_tokens=3, parked=True)
    pipeline.add(job)

    assert pipeline.schedule() is None
    assert pipeline.called == [job.key]
    assert pipeline.scheduler.may_begin() == []
    pipeline.drain()

    assert pipeline.outputs[job.key] == expected_output(job, 3)


def test_a_parked_job_is_called_as_soon_as_there_is_room() -> None:
    pipeline = Pipeline(config(num_blocks=2))
    decoding(pipeline, "runs", num_prompt=2 * BLOCK_TOKENS - 9, max_tokens=5)
    pipeline.add(request("waits", parked=True, max_tokens=1))

    while pipeline.scheduler.num_running:
        assert pipeline.called == []
        pipeline.turn()
    pipeline.schedule()

    assert pipeline.called == [("waits", 1)]


def test_begun_jobs_that_wait_get_room_before_any_parked_one() -> None:
    pipeline = Pipeline(config(max_seats=1))
    for name, parked in (("runs", False), ("waits", False), ("parked", True)):
        pipeline.add(request(name, max_tokens=1, parked=parked))

    pipeline.schedule()

    assert pipeline.called == []
    pipeline.drain()
    assert [name for name, _ in pipeline.ends] == ["runs", "waits", "parked"]


def test_a_parked_job_is_called_while_another_waits_for_its_adapters_place() -> None:
    pipeline = Pipeline(config(max_adapters=1))
    for name, adapter in (("runs", "x"), ("waits", "y")):
        pipeline.add(request(name, adapter=adapter))
    pipeline.schedule()

    pipeline.add(request("parked", parked=True))
    pipeline.hear(pipeline.scheduler.may_begin())

    assert pipeline.called == [("parked", 1)]


def test_smaller_jobs_pass_a_long_one_a_bounded_number_of_times() -> None:
    pipeline = Pipeline(config(num_blocks=4))
    decoding(pipeline, "runs", num_prompt=BLOCK_TOKENS, max_tokens=1000)
    long = request("long", num_prompt=4 * BLOCK_TOKENS, parked=True)
    pipeline.add(long)
    for number in range(2 * MAX_OVERTAKEN):
        pipeline.add(request(f"small {number}", max_tokens=1, parked=True))
        pipeline.hear(pipeline.scheduler.may_begin())
        for key in pipeline.called:
            pipeline.abort(key)

    assert long.key not in pipeline.called
    assert len(pipeline.called) == MAX_OVERTAKEN


def test_nothing_is_left_of_a_cancelled_parked_job() -> None:
    pipeline = Pipeline(config())
    job = request(parked=True)
    pipeline.add(job)

    pipeline.abort(job.key)
    pipeline.scheduler.begin(job.key)

    assert pipeline.scheduler.idle


def row(number: int, num_tokens: int) -> ClaimedJob:
    return cast(
        ClaimedJob,
        SimpleNamespace(
            job_id=UUID(int=number), fence=1, prompt_ids=(0,) * num_tokens, output_ids=()
        ),
    )


def parked(sizes: list[int], *, num_blocks: int, live: list[tuple[int, bool]]) -> list[int]:
    """Places of those of the claimed rows that wait. `live` are known tokens, and whether it is
    parked."""
    jobs = [
        cast(Any, SimpleNamespace(num_known=size, parked=is_parked)) for size, is_parked in live
    ]
    waiting = without_room(
        [row(*one) for one in enumerate(sizes)], cast(list[LiveJob], jobs), num_blocks
    )
    return sorted(job_id.int for job_id, _ in waiting)


def test_claimed_rows_wait_from_the_first_that_the_kv_cannot_hold() -> None:
    assert parked([10, 64, 65, 1], num_blocks=4, live=[]) == [3]
    assert parked([10, 200, 1], num_blocks=4, live=[]) == [1, 2]
    assert parked([10, 20], num_blocks=4, live=[(130, False)]) == [1]
    assert parked([10], num_blocks=4, live=[(10, False), (500, True)]) == [0]
    assert parked([1] * 20, num_blocks=20, live=[]) == [18, 19], (
        "a block for so many running ones is left free"
    )


def test_the_event_that_a_job_may_begin_ends_nothing() -> None:
    pipeline = Pipeline(config())
    job = request(parked=True, max_tokens=1)
    pipeline.add(job)

    assert pipeline.scheduler.may_begin() == [MayBegin(key=job.key)]
    assert pipeline.scheduler.has(job.key)
