"""The load's steps are those that the scheduler cuts from it."""

from __future__ import annotations

import pytest

from shardline.contract.job import SamplingParams
from shardline_costs import Workload
from shardline_costs.workload import StepKind
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Request
from shardline_scheduler.step_plan import StepPlan, StepResult
from tests.chain import CountingSink

NEAR = 0.1


def scheduled(load: Workload, num_lanes: int) -> list[StepPlan]:
    """The steps of the real scheduler, in which each step's answer comes when all lanes are in
    flight."""
    config = SchedulerConfig(
        num_blocks=100_000,
        max_seats=load.concurrency,
        token_budget=load.token_budget,
        num_lanes=num_lanes,
        max_len=100_000,
        prefix_cache=False,
        prompt_lookup=0,
    )
    scheduler = Scheduler(config)
    flights = []
    plans = []
    params = SamplingParams(max_tokens=load.output, temperature=0.0, ignore_eos=True)
    for number in range(load.concurrency):
        request = Request(
            key=(str(number), 0), prompt_ids=(number,) * load.prompt, params=params, seed=0
        )
        scheduler.add(request, CountingSink(load.output))
    while not scheduler.idle:
        plan = scheduler.schedule()
        if plan is not None:
            plans.append(plan)
            flights.append(plan)
        else:
            done = flights.pop(0)
            scheduler.apply(StepResult(done.step, ((7,),) * done.num_wanting))
    return [plan for plan in plans if plan.rows]


def total(steps: list[StepKind], of: str) -> float:
    return sum(step.count * getattr(step, of) for step in steps)


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
@pytest.mark.parametrize(
    ("prompt", "output", "concurrency"), [(160, 64, 64), (32, 16, 128), (1500, 64, 8)]
)
def test_a_batch_of_requests(prompt: int, output: int, concurrency: int, num_lanes: int) -> None:
    load = Workload(prompt=prompt, output=output, concurrency=concurrency, at_once=True)
    real = scheduled(load, num_lanes)
    steps = load.steps(num_lanes)
    assert sum(step.count for step in steps) == pytest.approx(len(real), rel=NEAR)
    rows = [row for plan in real for row in plan.rows]
    decodes = [row for row in rows if row.decodes]
    assert total(steps, "decodes") == pytest.approx(len(decodes), rel=NEAR)
    assert total(steps, "prefill") == pytest.approx(
        sum(row.length for row in rows if not row.decodes), rel=NEAR
    )
    context = sum(row.start + 1 for row in decodes)
    assert total(steps, "decode_context") == pytest.approx(context, rel=NEAR)
    attended = sum(row.length * (row.start + row.length / 2) for row in rows if not row.decodes)
    assert total(steps, "prefill_context") == pytest.approx(attended, rel=NEAR)


def test_requests_without_end_pay_for_a_prompt_with_each_completion() -> None:
    load = Workload(prompt=100, output=50, concurrency=64)
    (step,) = load.steps(2)
    assert step.prefill == pytest.approx(step.decodes * 2)
    assert step.rows <= load.token_budget
    assert step.count * step.decodes == pytest.approx(64 * 50)
