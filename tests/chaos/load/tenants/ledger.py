"""What tenants asked for and were told: jobs, pauses, schedules, families, acts on many, webhooks.
Knows no server.

Moments are Postgres's: it answers what time it is after an answer came, and before a request goes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

MARK = "chaos, tenants"
"""In the metadata of their jobs, which have the request's number and the states in which they may
end beside it."""
TEAM = "chaos-team"
SPENDER = "chaos-spender"
"""The tenant with quotas."""
PRICE = (3, 5)
"""What a million tokens of the spender's model cost, in and out."""
LIMITS: Mapping[str, int] = {
    "max_running": 2,
    "max_queued": 5,
    "requests_per_min": 40,
    "budget_tokens": 1_000_000,
    "budget_money": 1_000,
}


@dataclass(slots=True, kw_only=True)
class HeldPause:
    """A pause, as far as its owner knows."""

    kind: str
    target: str
    acknowledged_at: datetime
    resume_asked_at: datetime | None = None
    """None: it was never resumed."""


@dataclass(slots=True, kw_only=True)
class TimedSchedule:
    """A schedule that fires each minute."""

    name: str
    acknowledged_at: datetime
    stop_asked_at: datetime | None = None
    """None: it was never deleted."""


@dataclass(slots=True, kw_only=True)
class JobFamily:
    """A job, and those that it waits for."""

    child: UUID
    parents: Sequence[UUID]
    runs_anyway: bool
    """`on_parent_failure` is `run`."""
    prompt_ids: Sequence[int] | None = None
    """Of the prompt with the parents' texts, as a door tokenized it; None: it was not asked."""


@dataclass(slots=True, kw_only=True)
class JobGroup:
    """Jobs that one filter finds, and what acts on all of them were told."""

    name: str
    held: Sequence[UUID]
    """Those that were to begin in an hour."""
    live: Sequence[UUID]
    again: Sequence[UUID]
    """Held ones that were submitted again."""
    priority: int
    changed: dict[str, int] = field(default_factory=dict)
    """By act: the sum of what was answered, where the last answer says that nothing is left."""
    num_unanswered: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryHeard:
    """One request to a webhook endpoint."""

    delivery: str
    """Its `webhook-id`."""
    event_type: str
    job_id: UUID | None
    """None: its body is not one of ours."""
    is_signed: bool
    status_code: int
    """What it was answered."""


@dataclass(slots=True, kw_only=True)
class HeardEndpoint:
    """The endpoint of the team."""

    id: UUID
    secret: str
    acknowledged_at: datetime


@dataclass(slots=True, kw_only=True)
class TenantLedger:
    """Written by the load's threads, read by the judges when these have ended."""

    promised: list[UUID] = field(default_factory=list)
    refused: list[UUID] = field(default_factory=list)
    """By a quota."""
    pauses: list[HeldPause] = field(default_factory=list)
    schedules: list[TimedSchedule] = field(default_factory=list)
    families: list[JobFamily] = field(default_factory=list)
    groups: list[JobGroup] = field(default_factory=list)
    endpoint: HeardEndpoint | None = None
    deliveries: list[DeliveryHeard] = field(default_factory=list)
    ends: list[threading.Event] = field(default_factory=list)
    """Set by actors who have seen the end of all that they asked for."""

    def counts(self) -> dict[str, int]:
        """How much of each there is: a judge that had nothing to judge proves nothing."""
        return {
            "accepted": len(self.promised),
            "refused": len(self.refused),
            "pauses": len(self.pauses),
            "schedules": len(self.schedules),
            "families": len(self.families),
            "acts": sum(len(group.changed) for group in self.groups),
            "webhooks": len(self.deliveries),
        }
