"""Attempts at webhooks, as relays make them: claimed, recorded, given up, forgotten. Knows no HTTP.

A claim puts `due_at` off for as long as an attempt may take: if its relay dies, the delivery is due
again then, under the same id. The number of the attempt is its fence, except that a success always
counts.
Locks: rows of `webhook_deliveries` with SKIP LOCKED to claim, in order of id to record; then rows
of `webhook_endpoints` in order of id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from uuid import UUID

from sqlalchemy import Connection, text

from shardline.store.connection.encoding import dump

MAX_ENDED = 1_000
"""Rows that one statement gives up or deletes."""

GONE = "it answered 410 Gone"

CLAIM = text("""
-- How many of this relay's attempts each endpoint has.
WITH busy AS (
    SELECT CAST(key AS uuid) AS endpoint_id, CAST(value AS int) AS number
    FROM jsonb_each_text(CAST(:busy AS jsonb))
),
-- How many more each may have: one that fails has one at a time.
room AS (
    SELECT id, CASE WHEN failing_since IS NULL THEN :per_endpoint ELSE 1 END
        - coalesce(number, 0) AS number
    FROM webhook_endpoints LEFT JOIN busy ON endpoint_id = id WHERE disabled_at IS NULL
),
-- The longest due of each, and of these first the first one of every endpoint.
due AS (
    SELECT waiting.id FROM room CROSS JOIN LATERAL (
        SELECT id, row_number() OVER (ORDER BY due_at, id) AS place FROM webhook_deliveries
        WHERE endpoint_id = room.id AND due_at <= now()
        ORDER BY due_at, id LIMIT greatest(room.number, 0)
    ) AS waiting ORDER BY waiting.place LIMIT :max_rows
),
-- What another relay takes at this moment is its own.
locked AS (
    SELECT id FROM webhook_deliveries WHERE id IN (SELECT id FROM due) AND due_at <= now()
    FOR UPDATE SKIP LOCKED
),
-- Ours for a while.
claimed AS (
    UPDATE webhook_deliveries SET due_at = now() + make_interval(secs => :lease_s),
        num_attempts = num_attempts + 1
    FROM locked WHERE webhook_deliveries.id = locked.id
    RETURNING webhook_deliveries.id, endpoint_id, event_type, object_id, created_at, is_test,
        num_attempts
)
SELECT claimed.id, endpoint_id, event_type, object_id, claimed.created_at, is_test,
    num_attempts AS attempt, url, secret,
    CASE WHEN old_secret_until > now() THEN old_secret END AS old_secret
FROM claimed JOIN webhook_endpoints ON webhook_endpoints.id = endpoint_id
""")

RECORD = text("""
-- What the relay has.
WITH outcomes AS (
    SELECT * FROM jsonb_to_recordset(CAST(:outcomes AS jsonb)) AS outcomes(
        id uuid, attempt int, state text, status_code int, error text, pause_s float8)
),
-- Deliveries that wait for it: of an attempt that another one has followed only a success counts.
locked AS (
    SELECT webhook_deliveries.id FROM webhook_deliveries JOIN outcomes USING (id)
    WHERE webhook_deliveries.state = 'pending'
        AND (outcomes.state = 'delivered' OR num_attempts = attempt)
    ORDER BY webhook_deliveries.id FOR UPDATE OF webhook_deliveries
)
UPDATE webhook_deliveries SET state = outcomes.state, status_code = outcomes.status_code,
    error = outcomes.error,
    due_at = CASE WHEN outcomes.state = 'pending'
        THEN now() + make_interval(secs => outcomes.pause_s) END,
    ended_at = CASE WHEN outcomes.state <> 'pending' THEN now() END
FROM locked JOIN outcomes USING (id)
WHERE webhook_deliveries.id = locked.id AND webhook_deliveries.state = 'pending'
""")

# A success ends the silence, a failure begins it. One that was disabled stays so.
JUDGE = text("""
-- What came of each endpoint's attempts.
WITH seen AS (
    SELECT endpoint_id, bool_or(is_success) AS is_success, bool_or(is_gone) AS is_gone
    FROM jsonb_to_recordset(CAST(:outcomes AS jsonb)) AS outcomes(
        endpoint_id uuid, is_success bool, is_gone bool)
    GROUP BY endpoint_id
),
-- Endpoints that it changes: one that takes all that it is sent is not written.
locked AS (
    SELECT webhook_endpoints.id FROM webhook_endpoints JOIN seen ON seen.endpoint_id = id
    WHERE disabled_at IS NULL AND (
        NOT is_success OR is_gone OR failing_since IS NOT NULL)
    ORDER BY webhook_endpoints.id FOR UPDATE OF webhook_endpoints
),
-- Why each is to be disabled, or null.
judged AS (
    SELECT locked.id, is_success,
        CASE WHEN is_gone THEN :gone
            WHEN NOT is_success AND failing_since < now() - make_interval(secs => :patience_s)
            THEN 'no webhook was taken since ' || to_char(failing_since, 'YYYY-MM-DD HH24:MI TZ')
        END AS reason
    FROM locked JOIN webhook_endpoints USING (id) JOIN seen ON seen.endpoint_id = locked.id
)
UPDATE webhook_endpoints SET
    failing_since = CASE WHEN is_success THEN NULL ELSE coalesce(failing_since, now()) END,
    disabled_at = CASE WHEN reason IS NOT NULL THEN now() END, disabled_reason = reason
FROM judged WHERE webhook_endpoints.id = judged.id AND disabled_at IS NULL
RETURNING webhook_endpoints.id, reason
""")

# Deliveries of an endpoint that is disabled or deleted, or that takes fewer than there are.
GIVE_UP = text("""
UPDATE webhook_deliveries SET state = 'dead', due_at = NULL, ended_at = now(),
    error = coalesce(error, 'its endpoint took none in time')
WHERE id = ANY(ARRAY(
    SELECT id FROM webhook_deliveries WHERE due_at < now() - make_interval(secs => :patience_s)
    LIMIT :max_rows FOR UPDATE SKIP LOCKED))
""")
FORGET = text("""
DELETE FROM webhook_deliveries WHERE id = ANY(ARRAY(
    SELECT id FROM webhook_deliveries WHERE ended_at < now() - make_interval(secs => :age_s)
    ORDER BY ended_at LIMIT :max_rows FOR UPDATE SKIP LOCKED))
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookAttempt:
    """One attempt, with all that it needs. Its secrets are not shown."""

    id: UUID
    endpoint_id: UUID
    event_type: str
    object_id: UUID
    created_at: datetime
    is_test: bool
    attempt: int
    """From 1."""
    url: str
    secrets: tuple[str, ...]
    """The present one first, during a rotation the old one too."""

    def __repr__(self) -> str:
        return f"WebhookAttempt({self.id}, attempt={self.attempt})"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOutcome:
    """What came of an attempt, and what follows."""

    attempt: WebhookAttempt
    state: Literal["pending", "delivered", "dead"]
    """`pending`: it is tried again, after `pause_s`."""
    status_code: int | None
    error: str | None
    pause_s: float
    is_gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DisabledEndpoint:
    """One that will hear of nothing more, and why."""

    id: UUID
    reason: str


def claim(
    connection: Connection,
    *,
    busy: Mapping[UUID, int],
    per_endpoint: int,
    max_rows: int,
    lease_s: float,
) -> list[WebhookAttempt]:
    """What is due, within the room of each endpoint; the caller's for `lease_s` once it commits.
    `busy` are the caller's attempts under way."""
    values = {
        "busy": dump({str(endpoint_id): number for endpoint_id, number in busy.items()}),
        "per_endpoint": per_endpoint,
        "max_rows": max_rows,
        "lease_s": lease_s,
    }
    found = []
    for row in connection.execute(CLAIM, values).mappings():
        fields = dict(row)
        secrets = fields.pop("secret"), fields.pop("old_secret")
        valid = tuple(secret for secret in secrets if secret is not None)
        found.append(WebhookAttempt(**fields, secrets=valid))
    return found


def record(
    connection: Connection, outcomes: Sequence[AttemptOutcome], *, patience_s: float
) -> list[DisabledEndpoint]:
    """Writes what came of attempts. An endpoint is disabled, and returned, when it is gone, or when
    none of its deliveries succeeded for `patience_s`."""
    if not outcomes:
        return []
    rows = [
        {
            "id": one.attempt.id,
            "attempt": one.attempt.attempt,
            "state": one.state,
            "status_code": one.status_code,
            "error": one.error,
            "pause_s": one.pause_s,
        }
        for one in outcomes
    ]
    connection.execute(RECORD, {"outcomes": dump(rows)})
    judged = [
        {
            "endpoint_id": one.attempt.endpoint_id,
            "is_success": one.state == "delivered",
            "is_gone": one.is_gone,
        }
        for one in outcomes
        if not one.attempt.is_test
    ]
    values = {"outcomes": dump(judged), "gone": GONE, "patience_s": patience_s}
    rows_of = connection.execute(JUDGE, values) if judged else ()
    return [DisabledEndpoint(id=row.id, reason=row.reason) for row in rows_of if row.reason]


def give_up(connection: Connection, *, patience_s: float) -> int:
    """Ends deliveries that were due for `patience_s` without a try. Returns how many, at
    most MAX_ENDED."""
    values = {"patience_s": patience_s, "max_rows": MAX_ENDED}
    return connection.execute(GIVE_UP, values).rowcount


def forget(connection: Connection, *, age_s: float) -> int:
    """Deletes deliveries that ended so long ago. Returns how many, at most MAX_ENDED."""
    return connection.execute(FORGET, {"age_s": age_s, "max_rows": MAX_ENDED}).rowcount
