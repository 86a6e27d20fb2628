"""The energy of steps, divided among the sequences that had rows in them."""

from __future__ import annotations

import pytest

from shardline_scheduler.events import Event, Failed, Finished, NewTokens
from tests.simulation.pipeline import Pipeline, config, request

STEP_J = 12.0


def deliver(pipeline: Pipeline) -> list[Event]:
    """The answer to the oldest step, which took STEP_J."""
    events = pipeline.scheduler.apply(pipeline.flights.popleft()[1], STEP_J)
    pipeline.hear(events)
    return events


def energies(events: list[Event]) -> dict[str, float]:
    """What is told last of each job."""
    return {event.key[0]: event.energy_j for event in events if isinstance(event, NewTokens | Finished | Failed)}


def test_a_step_is_divided_by_packed_rows_of_decodes_and_chunks() -> None:
    pipeline = Pipeline(config(token_budget=12))
    pipeline.add(request("a", num_prompt=3, max_tokens=9))
    pipeline.schedule()
    assert energies(deliver(pipeline)) == {"a": STEP_J}

    pipeline.add(request("b", num_prompt=11, max_tokens=9))
    pipeline.schedule()

    told = energies(deliver(pipeline))
    assert told == {"a": pytest.approx(STEP_J + STEP_J / 12), "b": pytest.approx(STEP_J * 11 / 12)}


def test_chunks_that_gave_no_token_count_with_the_first_token() -> None:
    pipeline = Pipeline(config(token_budget=8, num_lanes=3))
    pipeline.add(request(num_prompt=20, max_tokens=1))
    for _ in range(3):
        pipeline.schedule()

    told = [energies(deliver(pipeline)) for _ in range(3)]

    assert told == [{}, {}, {"a": pytest.approx(3 * STEP_J)}]


def test_what_a_lost_epoch_took_stays_with_its_jobs() -> None:
    pipeline = Pipeline(config())
    pipeline.add(request(num_prompt=4, max_tokens=2))
    pipeline.schedule()
    deliver(pipeline)

    pipeline.rebuild(64)
    pipeline.schedule()

    assert energies(deliver(pipeline)) == {"a": pytest.approx(2 * STEP_J)}


def test_a_job_that_fails_or_is_cancelled_has_taken_what_it_took() -> None:
    pipeline = Pipeline(config())
    for name in "ab":
        pipeline.add(request(name, num_prompt=4, max_tokens=9))
    pipeline.schedule(bad=(0,))

    assert energies(deliver(pipeline)) == {"a": pytest.approx(STEP_J / 2), "b": pytest.approx(STEP_J / 2)}
    finished = pipeline.abort(("b", 1))
    assert finished is not None
    assert finished.energy_j == pytest.approx(STEP_J / 2)


def test_a_step_that_only_closes_sequences_is_charged_to_nobody() -> None:
    pipeline = Pipeline(config())
    pipeline.add(request(max_tokens=1))
    pipeline.schedule()
    deliver(pipeline)
    pipeline.schedule()

    assert deliver(pipeline) == []
    assert pipeline.scheduler.idle
