"""What a simulation predicts for the whole fleet: the counts of its sample, scaled. Knows no
terminal."""

from __future__ import annotations

import msgspec

from shardline_fleet.simulator.fleet_file import LoadFile, Scenario
from shardline_fleet.simulator.server_load import FleetRates, ServerLoad, server_loads
from shardline_fleet.simulator.tally import Spread, Tally

BOUND_SHARE = 0.99
"""Of the jobs of a server that must keep a bound."""
WARM_SHARE = 0.25
"""Of a server's seconds, which its speed leaves out: jobs have begun only."""


class FleetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet as it was planned."""

    devices: int
    cells: int
    simulated_cells: int
    pipelines: float
    stages: float
    """In pipelines; spares are not counted."""
    seats: float
    plans: tuple[str, ...]
    """Of each kind of cells, as relays log them."""
    predicted_tokens_per_s: float
    """By the planner, of all pipelines with all seats taken by such jobs."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Rates and numbers are of the whole fleet, latencies of the jobs of its sample."""

    fleet: FleetSummary
    scenario: Scenario
    jobs: float
    unfinished: float
    failed: float
    seconds: float
    """From the first moment to the end of the last job."""
    tokens_per_s: float
    jobs_per_s: float
    ttft_s: Spread
    token_s: Spread
    """Between a job's tokens, on average."""
    request_s: Spread
    keeps_bounds: bool | None
    """None offline, which has no bounds."""
    held_up: float
    """Jobs that a fault held up."""
    held_up_s: Spread
    """Until their next token."""
    tokens_again: float
    timeline: tuple[float, ...]
    """Output tokens of each second."""
    servers: tuple[ServerLoad, ...]

    @classmethod
    def of(
        cls, fleet: FleetSummary, share: float, load: LoadFile, tally: Tally, num_jobs: int
    ) -> Outcome:
        """Makes it from the counts of a sample that is this share of the fleet."""
        has_bounds = load.scenario is not Scenario.OFFLINE
        ttft = Spread.of(tally.ttft_s)
        token = Spread.of(tally.token_s)
        unfinished = num_jobs - tally.num_ended - tally.num_failed
        if load.scenario is Scenario.SERVER:
            tokens_per_s = tally.tokens_per_s(WARM_SHARE * load.seconds, load.seconds) / share
        else:
            tokens_per_s = sum(tally.tokens.values()) / share / max(tally.ended_s, 1e-9)
        mean_output = sum(tally.tokens.values()) / max(1, tally.num_ended)
        jobs_per_s = tokens_per_s / max(1.0, mean_output)
        return cls(
            fleet=fleet,
            scenario=load.scenario,
            jobs=num_jobs / share,
            unfinished=unfinished / share,
            failed=tally.num_failed / share,
            seconds=tally.ended_s,
            tokens_per_s=tokens_per_s,
            jobs_per_s=jobs_per_s,
            ttft_s=ttft,
            token_s=token,
            request_s=Spread.of(tally.request_s),
            keeps_bounds=_keeps_bounds(load, tally, num_jobs) if has_bounds else None,
            held_up=len(tally.gaps_s) / share,
            held_up_s=Spread.of(tally.gaps_s),
            tokens_again=tally.num_again / share,
            timeline=tuple(
                tally.tokens.get(second, 0) / share for second in range(int(tally.ended_s) + 1)
            ),
            servers=tuple(server_loads(_rates(fleet, tally, jobs_per_s, tokens_per_s))),
        )


def _keeps_bounds(load: LoadFile, tally: Tally, num_jobs: int) -> bool:
    """Checks all jobs, unfinished ones too."""
    kept = sum(seconds <= load.ttft_s for seconds in tally.ttft_s)
    in_time = sum(seconds <= load.token_s for seconds in tally.token_s)
    return min(kept, in_time) >= BOUND_SHARE * num_jobs


def _rates(fleet: FleetSummary, tally: Tally, jobs_per_s: float, tokens_per_s: float) -> FleetRates:
    """Returns rates with the running jobs that there are by Little's law; with a full queue that is
    all seats."""
    mean_s = sum(tally.request_s) / max(1, len(tally.request_s))
    return FleetRates(
        stages=fleet.devices,
        heads=fleet.pipelines,
        running=min(fleet.seats, jobs_per_s * mean_s),
        jobs_per_s=jobs_per_s,
        tokens_per_s=tokens_per_s,
    )
