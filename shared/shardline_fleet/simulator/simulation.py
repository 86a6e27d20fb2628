"""One simulation: cells, the queue of their heads, jobs that come, faults that strike. Prints
nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from shardline.base.config import Times
from shardline_costs import Workload
from shardline_costs.prediction import Predictor
from shardline_fleet.simulator.agenda import Agenda
from shardline_fleet.simulator.arrivals import Arrival, Arrivals
from shardline_fleet.simulator.cell import Cell, Ground
from shardline_fleet.simulator.fleet_file import FaultFile, FleetFile, read_model
from shardline_fleet.simulator.job_line import JobLine
from shardline_fleet.simulator.outcome import FleetSummary, Outcome
from shardline_fleet.simulator.plan_book import PlanBook, SplitByHand
from shardline_fleet.simulator.sampled_fleet import SampledFleet
from shardline_fleet.simulator.simulated_head import HeadCalls
from shardline_fleet.simulator.simulated_job import SimulatedJob
from shardline_fleet.simulator.tally import Tally
from shardline_scheduler.scheduler_config import SchedulerConfig

STUCK_S = 600.0
"""A simulation ends when unfinished jobs have had no token for so long."""


class Simulation:
    """Runs once."""

    def __init__(self, fleet: FleetFile, folder: Path) -> None:
        """`folder`: paths in the file are relative to it. Raises Invalid."""
        self._fleet = fleet
        self._random = random.Random(fleet.seed)  # noqa: S311 (no secret)
        self._agenda = Agenda()
        self._line = JobLine()
        self._tally = Tally()
        model = self._model = read_model(fleet, folder)
        self._arrivals = Arrivals(fleet.load, folder)
        self._sampled = SampledFleet.of(fleet, model, folder)
        ground = Ground(
            agenda=self._agenda,
            model=model,
            plans=PlanBook(model) if fleet.split is None else SplitByHand(model, fleet.split),
            calls=HeadCalls(
                tokens=self._add_tokens,
                ended=self._end,
                failed=self._fail,
                given_back=self._line.put,
                has_room=self._line.open,
            ),
            times=Times(),
            config=SchedulerConfig(
                num_blocks=1,
                max_seats=fleet.seats,
                token_budget=fleet.token_budget,
                num_lanes=1,
                max_len=self._arrivals.max_len,
                prefix_cache=False,
            ),
            lanes=fleet.lanes,
            load_s=fleet.load_s,
        )
        self._cells = [
            Cell(ground, number, kind.profiles)
            for number, kind in enumerate(self._sampled.kinds)
            for _ in range(kind.num_simulated)
        ]
        self._num_jobs = 0
        self._moved_s = 0.0
        """When the last job came or the last token, if that is later."""

    def run(self) -> Outcome:
        """Until all jobs have ended, or are stuck. Raises Invalid if a cell does not hold the
        model."""
        load = self._fleet.load
        for fault in self._fleet.faults:
            self._prepare(fault)
        for cell in self._cells:
            cell.start()
        summary = self._summary()
        for arrival in self._arrivals.of_share(self._sampled.share, self._random):
            self._note(arrival)
        self._agenda.run(self._is_over)
        return Outcome.of(summary, self._sampled.share, load, self._tally, self._num_jobs)

    def _summary(self) -> FleetSummary:
        """Sums up the cells as they have just started."""
        share = self._sampled.share
        planned = Workload(
            prompt=self._arrivals.prompt,
            output=max(2, self._arrivals.output),
            concurrency=self._fleet.seats,
            token_budget=self._fleet.token_budget,
        )
        predictor = Predictor(self._model, planned)
        chains = [
            head.chain for cell in self._cells for head in cell.heads if head.chain is not None
        ]
        return FleetSummary(
            devices=self._fleet.num_devices,
            cells=sum(kind.count for kind in self._sampled.kinds),
            simulated_cells=len(self._cells),
            pipelines=len(chains) / share,
            stages=sum(chain.num_stages for chain in chains) / share,
            seats=len(chains) * self._fleet.seats / share,
            plans=tuple(dict.fromkeys(str(cell.deployment) for cell in self._cells)),
            predicted_tokens_per_s=sum(
                predictor.predict(chain.stages).tokens_per_s for chain in chains
            )
            / share,
        )

    def _note(self, arrival: Arrival) -> None:
        job = SimulatedJob(
            number=self._num_jobs,
            prompt=arrival.prompt,
            output=arrival.output,
            arrived_s=arrival.at_s,
        )
        self._num_jobs += 1
        self._agenda.at(arrival.at_s, partial(self._line.put, job))
        self._moved_s = max(self._moved_s, arrival.at_s)

    def _is_over(self) -> bool:
        is_stuck = self._agenda.now_s - self._moved_s > STUCK_S
        return is_stuck or self._tally.num_ended + self._tally.num_failed == self._num_jobs

    def _add_tokens(self, job: SimulatedJob, num: int) -> None:
        self._moved_s = max(self._moved_s, self._agenda.now_s)
        self._tally.add_tokens(job, num, self._agenda.now_s)

    def _end(self, job: SimulatedJob) -> None:
        self._tally.add_end(job, self._agenda.now_s)

    def _fail(self, _job: SimulatedJob) -> None:
        self._tally.num_failed += 1

    # Faults.

    def _prepare(self, fault: FaultFile) -> None:
        """Draws whom it strikes, and notes when."""
        at = fault.at_s
        agenda = self._agenda
        if fault.slow is not None:
            for cell in self._random.sample(self._cells, round(fault.slow * len(self._cells))):
                agenda.at(at, partial(cell.slow, fault.latency_ms / 1e3))
                if fault.back_s is not None:
                    agenda.at(at + fault.back_s, partial(cell.slow, 0.0))
            return
        struck = self._struck(fault.lose or fault.join or 0.0, machines=fault.machines)
        for cell, name in struck:
            if fault.join is not None:
                cell.workers[name].is_here = False
                agenda.at(at, partial(cell.join, name))
            else:
                agenda.at(
                    at, partial(cell.lose, name, is_silent=fault.machines, back_s=fault.back_s)
                )

    def _struck(self, share: float, *, machines: bool) -> Sequence[tuple[Cell, str]]:
        """Devices, or all of whole machines, that make up a share of the fleet."""
        units: dict[tuple[int, str], list[tuple[Cell, str]]] = {}
        for number, cell in enumerate(self._cells):
            for name, worker in cell.workers.items():
                unit = worker.profile.machine if machines else name
                units.setdefault((number, unit), []).append((cell, name))
        drawn = self._random.sample(list(units.values()), max(1, round(share * len(units))))
        return [each for unit in drawn for each in unit]
