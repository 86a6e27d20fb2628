"""Recurrent states of open sequences: no more at once than stages hold, and nothing that would
take a state back."""

from __future__ import annotations

from tests.simulation.pipeline import Pipeline, config, expected_output, request


def test_a_job_waits_until_an_open_one_gives_its_state_back() -> None:
    # Given two states, and three jobs of which the second ends first
    pipeline = Pipeline(config(num_states=2))
    for name, length in (("a", 100), ("b", 1), ("c", 100)):
        pipeline.add(request(name, max_tokens=length))
    first = pipeline.schedule()
    assert first is not None
    assert len(first.opens) == 2

    # When it has ended
    pipeline.deliver()

    # Then the third opens in the step after the one that closes it: a stage opens before it closes
    closing = pipeline.schedule()
    assert closing is not None
    assert (len(closing.opens), len(closing.closes)) == (0, 1)
    pipeline.deliver()
    opening = pipeline.schedule()
    assert opening is not None
    assert len(opening.opens) == 1


def test_a_prompt_is_computed_again_where_no_snapshot_is_behind_it() -> None:
    pipeline = Pipeline(config(num_states=8, prompt_lookup=16))
    jobs = [request(name, num_prompt=200, num_common=200, max_tokens=40) for name in "ab"]
    pipeline.add(jobs[0])
    pipeline.drain()
    pipeline.add(jobs[1])

    plan = pipeline.schedule()
    assert plan is not None
    assert [each.num_cached for each in plan.opens] == [0]
    while plan is not None:
        assert plan.num_drafts == 0
        pipeline.deliver()
        plan = pipeline.schedule()

    assert [pipeline.outputs[job.key] for job in jobs] == [expected_output(job, 40) for job in jobs]


def test_a_parked_job_is_called_when_a_state_is_free() -> None:
    pipeline = Pipeline(config(num_states=1, max_seats=4))
    pipeline.add(request("runs", max_tokens=3))
    pipeline.add(request("waits", parked=True, max_tokens=1))

    pipeline.schedule()
    assert pipeline.called == []
    pipeline.drain()

    assert [name for name, _ in pipeline.ends] == ["runs", "waits"]
