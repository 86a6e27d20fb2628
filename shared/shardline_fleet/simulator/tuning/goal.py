"""What tuning makes as good as can be, as one number of an outcome. Knows no search."""

from __future__ import annotations

from enum import StrEnum

from shardline_fleet.simulator.fleet_file import LoadFile
from shardline_fleet.simulator.outcome import Outcome

BROKEN_BOUND = 1e6
"""Of a bound that is exceeded by its own length: more than any goal's seconds, so that bounds come first."""


class TuningGoal(StrEnum):
    """Latencies are of all jobs, in the percentile that the name says."""

    TOKENS_PER_S = "tokens-per-s"
    TTFT_P50 = "ttft-p50"
    TTFT_P99 = "ttft-p99"
    REQUEST_P50 = "request-p50"
    REQUEST_P99 = "request-p99"


def cost_of(goal: TuningGoal, outcome: Outcome, load: LoadFile) -> float | None:
    """Seconds to be as few as can be: of an output token, or a latency; None if jobs were left without an end.

    A load that has bounds comes first to them: whoever breaks them costs more than whoever does not.
    """
    if outcome.unfinished or outcome.failed or not outcome.tokens_per_s:
        return None
    seconds = {
        TuningGoal.TOKENS_PER_S: 1 / outcome.tokens_per_s,
        TuningGoal.TTFT_P50: outcome.ttft_s.p50,
        TuningGoal.TTFT_P99: outcome.ttft_s.p99,
        TuningGoal.REQUEST_P50: outcome.request_s.p50,
        TuningGoal.REQUEST_P99: outcome.request_s.p99,
    }[goal]
    if outcome.keeps_bounds is not False:
        return seconds
    excess = max(outcome.ttft_s.p99 / load.ttft_s, outcome.token_s.p99 / load.token_s) - 1
    return seconds + BROKEN_BOUND * max(0.0, excess)
