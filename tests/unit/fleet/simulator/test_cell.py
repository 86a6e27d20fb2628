"""A cell's workers: who takes over for whom, and when, while one job after the other runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from shardline.base.config import Times
from shardline_costs import DeviceProfile
from shardline_fleet.deployment.fleet_planner import Deployment
from shardline_fleet.simulator.agenda import Agenda
from shardline_fleet.simulator.cell import FORM_S, Cell, Ground
from shardline_fleet.simulator.job_line import JobLine
from shardline_fleet.simulator.plan_book import PlanBook
from shardline_fleet.simulator.simulated_head import HeadCalls
from shardline_fleet.simulator.simulated_job import SimulatedJob
from shardline_fleet.simulator.tally import Tally
from shardline_scheduler.scheduler_config import SchedulerConfig
from tests.unit.fleet.planner.fleets import device, model

TWO_STAGES = ((0, 6), (6, 12))
STEP_S = 0.012
TIMES = Times()
LOAD_S = 5.0


class FixedPlans(PlanBook):
    """Each worker that is here has the place that is given."""

    def __init__(self, stages: Mapping[str, int]) -> None:
        super().__init__(model(12))
        self._stages = stages

    def replan(
        self,
        kind: int,
        profiles: Mapping[str, DeviceProfile],
        now: Deployment | None,
        *,
        may_improve: bool,
    ) -> Deployment | None:
        assert kind == 0
        assert not may_improve or now
        stages = {name: self._stages[name] for name in profiles}
        return None if now and now.stages == stages else Deployment(split=TWO_STAGES, stages=stages)


@dataclass
class Play:
    """A cell with one job at a time, which begins at once and never ends by itself."""

    stages: dict[str, int]
    agenda: Agenda = field(default_factory=Agenda)
    tally: Tally = field(default_factory=Tally)
    line: JobLine = field(default_factory=JobLine)

    def __post_init__(self) -> None:
        calls = HeadCalls(
            tokens=lambda job, num: self.tally.add_tokens(job, num, self.agenda.now_s),
            ended=lambda job: self.tally.add_end(job, self.agenda.now_s),
            failed=self.line.put,
            given_back=self.line.put,
            has_room=self.line.open,
        )
        ground = Ground(
            agenda=self.agenda,
            model=model(12),
            plans=FixedPlans(self.stages),
            calls=calls,
            times=TIMES,
            config=SchedulerConfig(
                num_blocks=1,
                max_seats=4,
                token_budget=256,
                num_lanes=1,
                max_len=100_000,
                prefix_cache=False,
            ),
            lanes=None,
            load_s=LOAD_S,
        )
        self.cell = Cell(ground, 0, {name: device(name) for name in self.stages})
        self.job = SimulatedJob(number=0, prompt=10, output=50_000, arrived_s=0.0)
        self.cell.start()
        self.line.put(self.job)
        self.run(5.0)

    def run(self, seconds: float) -> None:
        until_s = self.agenda.now_s + seconds
        over: list[bool] = []
        self.agenda.at(until_s, lambda: over.append(True))
        self.agenda.run(lambda: bool(over))

    def gap_s(self, name: str, *, is_silent: bool = False, back_s: float | None = None) -> float:
        """From the loss of a worker to the job's next token."""
        self.cell.lose(name, is_silent=is_silent, back_s=back_s)
        self.run(100.0)
        (gap_s,) = self.tally.gaps_s
        return gap_s


PREFILL_S = 10 * STEP_S
"""Of 10 + 400 tokens, in steps of four times the time."""


def test_a_spare_follower_takes_over_at_once() -> None:
    play = Play({"head": 0, "tail": 1, "spare": 1})
    assert FORM_S < play.gap_s("tail") < FORM_S + PREFILL_S
    assert play.tally.num_again == 0


def test_a_machine_that_falls_silent_is_noticed_later() -> None:
    gap_s = Play({"head": 0, "tail": 1, "spare": 1}).gap_s("tail", is_silent=True)
    assert gap_s == pytest.approx(TIMES.link_dead_s + FORM_S, abs=PREFILL_S)


def test_without_a_spare_the_job_waits_for_the_follower() -> None:
    gap_s = Play({"head": 0, "tail": 1}).gap_s("tail", back_s=8.0)
    assert gap_s == pytest.approx(8.0 + FORM_S, abs=PREFILL_S)


def test_a_follower_of_a_dead_head_goes_to_another_one() -> None:
    play = Play({"head": 0, "other": 0, "tail": 1})
    gap_s = play.gap_s("head", is_silent=True)
    assert (
        TIMES.lease_s - TIMES.heartbeat_s < gap_s < TIMES.lease_s + TIMES.poll_s + PREFILL_S + 1.0
    )
    assert play.tally.num_again > 0


def test_a_head_that_comes_back_soon_ends_its_leases() -> None:
    gap_s = Play({"head": 0, "tail": 1}).gap_s("head", back_s=2.0)
    assert 2.0 < gap_s < 2.0 + TIMES.poll_s + PREFILL_S + 1.0


def test_a_cell_that_never_gets_its_stage_back_gives_its_jobs_up() -> None:
    play = Play({"head": 0, "tail": 1})
    play.cell.lose("tail", is_silent=False, back_s=None)
    play.run(TIMES.recover_s - 1.0)
    assert play.line.num_waiting == 0
    play.run(2.0)
    assert play.line.num_waiting == 1


def test_a_head_and_its_follower_may_be_lost_together() -> None:
    play = Play({"head": 0, "tail": 1, "other": 0, "spare": 1})
    play.cell.lose("head", is_silent=True, back_s=None)
    gap_s = play.gap_s("tail", is_silent=True)
    assert gap_s < TIMES.lease_s + TIMES.poll_s + PREFILL_S + 1.0


def test_a_worker_that_was_missed_loads_its_layers_anew() -> None:
    gap_s = Play({"head": 0, "tail": 1}).gap_s("tail", back_s=30.0)
    assert gap_s == pytest.approx(30.0 + TIMES.poll_s + LOAD_S + FORM_S, abs=PREFILL_S)
