"""How often a job's failed attempts are tried again, and after which wait. Knows no row and no
clock."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from shardline.base.errors import Invalid

FIELD = "retry"
MAX_ATTEMPTS = 32
"""A poison job costs its pipeline a restart with each."""
MAX_BACKOFF_S = 86_400
FIRST_BACKOFF_S = 3_600

RetriedFailure = Literal["crashed", "engine"]
"""Codes of `error`: engines died under it without a new token, or an engine ended it alone."""
RETRIED_FAILURES: tuple[str, ...] = get_args(RetriedFailure)
RetriedFailures = Annotated[tuple[RetriedFailure, ...], Meta(min_length=1, max_length=8)]


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The waits double from `backoff_s` to `max_backoff_s`. An attempt that saved tokens before its
    engine died is no failure: the job goes on at once."""

    max_attempts: Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)]
    """With the failure of this number the job ends."""
    backoff_s: Annotated[float, Meta(ge=1, le=FIRST_BACKOFF_S)] = 1.0
    max_backoff_s: Annotated[float, Meta(ge=1, le=MAX_BACKOFF_S)] = 600.0
    on: RetriedFailures = ("crashed",)
    """Any other failure ends the job."""

    def tries_again(self, failure: RetriedFailure, num_failures: int, ceiling: int) -> bool:
        """Returns whether the job is tried again after its failure of this number. No job has more
        attempts than the `ceiling`."""
        return failure in self.on and num_failures < min(self.max_attempts, ceiling)

    def wait_s(self, num_failures: int) -> float:
        """Returns the longest wait after the failure of this number; Postgres draws between its
        half and all of it."""
        return float(min(self.max_backoff_s, self.backoff_s * 2 ** (num_failures - 1)))


def check_retry(policy: RetryPolicy) -> None:
    """Checks what types cannot express. Raises Invalid."""
    if policy.backoff_s > policy.max_backoff_s:
        problem = f"it is {policy.backoff_s:g}, above max_backoff_s ({policy.max_backoff_s:g})"
        raise Invalid(f"{FIELD}.backoff_s", problem, "Lower it or raise max_backoff_s")
