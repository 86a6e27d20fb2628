"""Random adds, aborts, answers, bad rows and new epochs: outputs never change, no block leaks,
nothing is stuck."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shardline.contract.job import FinishReason
from shardline_scheduler.events import SequenceFailed, SequenceFinished
from shardline_scheduler.kv_blocks import blocks_for
from shardline_scheduler.offload import OffloadTerms
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Key, Request
from tests.simulation.pipeline import Pipeline, config, expected_output, expected_scores, request

MAX_LEN = 256
"""Four blocks."""

lanes = st.integers(1, 3)
pools = st.one_of(st.integers(4, 7), st.integers(2, 16))
"""Mostly too small for what runs."""

terms = st.builds(OffloadTerms, num_slots=st.sampled_from([0, 1, 2, 5, 16]))

configs = st.builds(
    config,
    num_blocks=pools,
    max_seats=st.sampled_from([1, 2, 4, 8, 8, 8]),
    token_budget=st.one_of(st.integers(1, 300), st.just(150)),
    num_lanes=lanes,
    max_len=st.just(MAX_LEN),
    prefix_cache=st.booleans(),
    prompt_lookup=st.sampled_from([0, 4, 16, 16, 64]),
    max_adapters=st.integers(1, 2),
    offload=terms,
    num_states=st.sampled_from([0, 0, 1, 2, 3, 8]),
)
heads = st.sampled_from([0, 0, 63, 64, 130, MAX_LEN])
"""Tokens that a prompt has in common with others."""
ADAPTERS = ("x", "y", "", "z", "")
lengths = st.one_of(
    st.integers(1, 8), st.sampled_from([60, 63, 64, 65, 127, 128, 129]), st.integers(1, MAX_LEN - 1)
)
limits = st.one_of(st.just(MAX_LEN), st.integers(1, 8), st.integers(1, MAX_LEN))


def check_end(pipeline: Pipeline, job: Request, limit: int) -> None:
    """The job ended, and its output is that of an undisturbed run or, if it was stopped, the
    beginning of it."""
    end = pipeline.ends[job.key]
    output = pipeline.outputs[job.key]
    expected = expected_output(job, limit)
    assert output == expected[: len(output)]
    if isinstance(end, SequenceFinished) and end.reason is not FinishReason.CANCELLED:
        assert output == expected
        assert end.prompt_logprobs == expected_scores(job)


class Life(RuleBasedStateMachine):
    """One head's life. Steps are answered when the machine says so."""

    @initialize(chosen=configs)
    def start(self, chosen: SchedulerConfig) -> None:
        self.pipeline = Pipeline(chosen)
        self.jobs: dict[Key, tuple[Request, int]] = {}

    @rule(prompts=st.lists(lengths, min_size=2, max_size=8), num_common=heads)
    def add_many(self, prompts: list[int], num_common: int) -> None:
        for num_prompt in prompts:
            self.add_one(
                (num_prompt, num_common),
                MAX_LEN,
                priority=1,
                flags=(False, False, num_common % 2 == 0),
                num_resumed=0,
            )

    @rule(
        prompt=st.tuples(lengths, heads),
        limit=limits,
        priority=st.integers(0, 2),
        flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        num_resumed=st.one_of(st.just(0), limits),
    )
    def add_one(
        self,
        prompt: tuple[int, int],
        limit: int,
        priority: int,
        flags: tuple[bool, bool, bool],
        num_resumed: int,
    ) -> None:
        (num_prompt, num_common), (suspect, parked, repeats) = prompt, flags
        limit = min(limit, MAX_LEN - num_prompt)
        name = f"job {len(self.jobs)}"
        fresh = request(
            name,
            num_prompt=num_prompt,
            num_common=num_common,
            max_tokens=limit,
            priority=priority,
            quarantined=suspect,
            parked=parked,
            repeats=repeats,
            tenant="one" if limit % 3 else "another",
            adapter=ADAPTERS[limit % 5],
            prompt_logprobs=0 if num_prompt % 4 == 0 else None,
        )
        job = replace(fresh, output_ids=tuple(expected_output(fresh, limit)[:num_resumed]))
        self.jobs[job.key] = (job, limit)
        self.pipeline.add(job)

    @rule(times=st.integers(1, 4), bad=st.one_of(st.none(), st.integers(0, 12)))
    def schedule(self, times: int, bad: int | None) -> None:
        for _ in range(times):
            self.pipeline.schedule(bad=() if bad is None else (bad,))

    @precondition(lambda self: self.pipeline.flights)
    @rule()
    def deliver(self) -> None:
        self.pipeline.deliver()

    @rule(times=st.integers(1, 40))
    def run(self, times: int) -> None:
        for _ in range(times):
            if not self.pipeline.scheduler.idle:
                self.pipeline.turn()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(
            st.sampled_from(
                sorted(self.jobs.keys() - self.pipeline.ends.keys()) or sorted(self.jobs)
            )
        )
        has_ended = key in self.pipeline.ends
        assert (self.pipeline.abort(key) is None) == has_ended

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def trust(self, data: st.DataObject) -> None:
        self.pipeline.scheduler.release(data.draw(st.sampled_from(sorted(self.jobs))))

    @rule(num_tokens=st.integers(1, 100), step_s=st.floats(0, 1))
    def learn(self, num_tokens: int, step_s: float) -> None:
        self.pipeline.scheduler.step_cost.learn(num_tokens, step_s)

    @rule(
        num_blocks=pools, num_lanes=st.one_of(st.none(), lanes), offload=st.one_of(st.none(), terms)
    )
    def rebuild(self, num_blocks: int, num_lanes: int | None, offload: OffloadTerms | None) -> None:
        self.pipeline.rebuild(num_blocks, num_lanes, offload)

    @invariant()
    def limits_hold(self) -> None:
        scheduler = self.pipeline.scheduler
        running = list(scheduler._batch.running.values())
        assert scheduler.num_running <= scheduler.config.max_seats
        assert scheduler.num_in_flight == len(self.pipeline.flights) <= scheduler.config.num_lanes
        assert sum(sequence.quarantined for sequence in running) <= 1
        assert not any(sequence.parked for sequence in running)
        held = {
            block
            for sequence in [*running, *scheduler._batch.leaving.values()]
            for block in sequence.blocks
        }
        assert len(held) == scheduler.blocks_used
        for plan, _, _ in self.pipeline.flights:
            assert plan.num_tokens <= scheduler.config.token_budget
            assert plan.rows or plan.closes
        assert scheduler.slots_used <= scheduler.config.offload.num_slots
        if not scheduler.num_waiting:
            assert scheduler.slots_used == 0
        states = scheduler._batch.kv.states
        assert states.num_snapshots + scheduler.num_running <= scheduler.config.num_states or (
            not scheduler.config.is_recurrent
        )

    def teardown(self) -> None:
        if not hasattr(self, "pipeline"):
            return
        self.pipeline.drain()
        assert self.pipeline.ends.keys() == self.jobs.keys()
        for job, limit in self.jobs.values():
            check_end(self.pipeline, job, limit)


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=50, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)


@settings(max_examples=30)
@given(
    chosen=configs,
    shapes=st.lists(st.tuples(lengths, limits, st.integers(0, 2)), min_size=1, max_size=16),
)
def test_any_budget_lanes_and_blocks_give_the_same_outputs(
    chosen: SchedulerConfig, shapes: list[tuple[int, int, int]]
) -> None:
    pipeline = Pipeline(replace(chosen, num_blocks=max(chosen.num_blocks, blocks_for(MAX_LEN))))
    jobs = [
        (
            request(
                f"job {number}",
                num_prompt=num_prompt,
                max_tokens=limit,
                priority=priority,
                repeats=number % 3 > 0,
            ),
            limit,
        )
        for number, (num_prompt, asked, priority) in enumerate(shapes)
        for limit in (min(asked, MAX_LEN - num_prompt),)
    ]

    for job, _ in jobs:
        pipeline.add(job)
    pipeline.drain()

    for job, limit in jobs:
        assert not isinstance(pipeline.ends[job.key], SequenceFailed)
        check_end(pipeline, job, limit)
