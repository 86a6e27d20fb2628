"""A stage's metrics: counted by the engine, or read from its parts when scraped. Knows no HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import structlog
from prometheus_client import CollectorRegistry

from services.stage.device.power import Power
from services.stage.jobs.latency import Latency
from services.stage.pipeline.pipeline import Pipeline
from services.stage.runtime import LoadedStage
from shardline.contract.job import JobState
from shardline_costs.drift import Drift
from shardline_costs.rates import Rates
from shardline_scheduler.events import Event, NewTokens
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.step_plan import StepPlan
from shardline_scheduler.step_times import StepTime
from shardline_server.metrics import HeadMetrics, StageMetrics

log = structlog.get_logger(__name__)

MAX_TENANTS = 100
"""Tenants with a separate label: each costs a scraper a series. Those that come later are
`other`."""


class StageMeter:
    """One per process."""

    def __init__(self, loaded: LoadedStage) -> None:
        self.registry = CollectorRegistry()
        self._metrics = StageMetrics(self.registry)
        self._head = HeadMetrics(self.registry) if loaded.is_head else None
        executor = loaded.executor
        self._stall_s = loaded.settings.times.stall_s
        self._warn_above_s = self._stall_s / 2
        """Also the longest step so far, once one was longer."""
        self._drift = drift = loaded.drift
        if drift is not None:
            self._metrics.step_time_ratio.set_function(lambda: drift.ratio)
            self._show_profile(drift)
        self._metrics.exact.set(executor.exact)
        self._model = loaded.settings.name
        if self._head is not None:
            for state in JobState:
                if state.terminal:
                    self._head.job_s.labels(self._model, str(state))
            self._head.first_token_s.labels(self._model)
            self._head.token_s.labels(self._model)
        layers = f"{loaded.layers.start}-{loaded.layers.stop - 1}"
        self._metrics.stage_info.labels(self._model, loaded.worker, loaded.device.name, layers).set(
            1
        )
        self._tenants: set[str] = set()
        self._power = loaded.power
        if loaded.power is not None:
            self._show_energy(loaded.power)
        self._metrics.kv_blocks.labels("used").set_function(lambda: executor.blocks_used)
        self._metrics.kv_blocks.labels("all").set(executor.num_blocks)
        states = self._metrics.recurrent_states
        states.labels("used").set_function(lambda: executor.states_used)
        states.labels("all").set(executor.num_states)

    def _show_profile(self, drift: Drift) -> None:
        """What was measured of the device and of its links; the device's rates follow its drift."""
        metrics = self._metrics

        metrics.device_bytes_per_s.labels("weights").set_function(
            lambda: _rates(drift).weight_bytes_per_s
        )
        metrics.device_bytes_per_s.labels("kv").set_function(
            lambda: _rates(drift).kv_bytes_per_s or math.nan
        )
        for rows, _ in _rates(drift).flops:
            metrics.device_flops.labels(f"{rows:.0f}").set_function(partial(_flops, drift, rows))
        for machine, link in drift.profile.links.items():
            metrics.link_latency_s.labels(machine).set(link.latency_s)
            metrics.link_bytes_per_s.labels(machine).set(link.bytes_per_s)

    def _show_energy(self, power: Power) -> None:
        joules = self._metrics.energy_j
        joules.labels("compute", power.source).set_function(lambda: power.computed_j)
        joules.labels("rest", power.source).set_function(
            lambda: max(0.0, power.drawn_j() - power.computed_j)
        )

    def step(self, plan: StepPlan, time: StepTime) -> None:
        """The engine's thread, after each step."""
        metrics = self._metrics
        seconds = time.compute_s
        metrics.steps.inc()
        if self._power is not None:
            self._power.add(seconds)
        if self._drift is not None:
            self._drift.add(plan, seconds)
        metrics.step_seconds.observe(seconds)
        for doing, spent_s in (("compute", seconds), ("hop", time.hop_s), ("wait", time.wait_s)):
            metrics.stage_seconds.labels(doing).inc(spent_s)
        num_out = sum(move.is_out for move in plan.moves)
        metrics.kv_moves.labels("out").inc(num_out)
        metrics.kv_moves.labels("back").inc(len(plan.moves) - num_out)
        if self._head is not None:
            self._head.draft_tokens.inc(plan.num_drafts)
            self._head.cached_tokens.inc(sum(opened.num_cached for opened in plan.opens))
            self._head.prompt_tokens.inc(sum(row.length for row in plan.rows if not row.decodes))
        if seconds > self._warn_above_s:
            self._warn_above_s = seconds
            log.warning(
                "a step took long: raise SHARDLINE_STALL_S or lower SHARDLINE_TOKEN_BUDGET",
                seconds=round(seconds, 1),
                counts_as_hung_after_s=self._stall_s,
            )

    def report(self, events: Iterable[Event]) -> None:
        """The engine's thread: tokens of one answer. All but its last were drafts."""
        if self._head is not None:
            nums = [len(event.ids) for event in events if isinstance(event, NewTokens)]
            self._head.output_tokens.inc(sum(nums))
            self._head.accepted_tokens.inc(sum(nums) - len(nums))

    def blamed(self, fates: Iterable[str]) -> None:
        """The lease manager's thread: what became of jobs under which the pipeline broke."""
        if self._head is not None:
            for fate in fates:
                self._head.blamed.labels(outcome=fate).inc()

    def charge(self, tenant: str, energy_j: float) -> None:
        """The lease manager's thread: the energy of an attempt that left this head."""
        if self._head is None:
            return
        if len(self._tenants) < MAX_TENANTS:
            self._tenants.add(tenant)
        self._head.job_energy_j.labels(tenant if tenant in self._tenants else "other").inc(energy_j)

    def ended(self, state: JobState, latency: Latency) -> None:
        """The lease manager's thread: a job's end is committed."""
        metrics = self._head
        if metrics is None:
            return
        metrics.job_s.labels(self._model, str(state)).observe(latency.whole_s)
        for histogram, seconds in (
            (metrics.first_token_s, latency.first_token_s),
            (metrics.token_s, latency.token_s),
        ):
            if seconds is not None:
                histogram.labels(self._model).observe(seconds)

    def watch(self, scheduler: Scheduler, pipeline: Pipeline) -> None:
        """Has a head's metrics read them."""
        metrics = self._head
        if metrics is None:
            return
        metrics.seats.set(scheduler.config.max_seats)
        metrics.running.set_function(lambda: scheduler.num_running)
        metrics.waiting.set_function(lambda: scheduler.num_waiting)
        snapshots = self._metrics.recurrent_states.labels("snapshots")
        snapshots.set_function(lambda: scheduler.num_snapshots)
        metrics.ready.set_function(lambda: pipeline.status().is_ready)
        metrics.epoch.set_function(lambda: pipeline.status().epoch or 0)


def _rates(drift: Drift) -> Rates:
    return Rates.of(drift.profile, drift.model)


def _flops(drift: Drift, rows: float) -> float:
    return dict(_rates(drift).flops)[rows]
