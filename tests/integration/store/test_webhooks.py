"""What endpoints are to hear: written with each end or not at all, by whoever ends a job; what
relays make of it."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest
from msgspec.structs import replace
from sqlalchemy import Engine, text

from shardline.base.errors import Conflict, Invalid, NotFound
from shardline.contract.ids import new_id
from shardline.contract.job import FinishReason, JobState
from shardline.contract.webhooks.event import EventType
from shardline.contract.webhooks.targets import WebhookReach
from shardline.store import jobs
from shardline.store.inserts import FailedRequest
from shardline.store.webhooks import deliveries, endpoints
from shardline.store.webhooks.endpoints import (
    MAX_ENDPOINTS,
    EndpointChange,
    EndpointSecret,
    NewEndpoint,
)
from shardline_server.store import ends, webhook_attempts
from shardline_server.store.ends import End
from shardline_server.store.webhook_attempts import AttemptOutcome, WebhookAttempt
from tests.integration.rows import cell, change, end, running, submit, success

PUBLIC = WebhookReach()
URL = "https://example.org/hooks"
DAY_S = 86_400.0


def make(engine: Engine, *names: str, tenant: str = "default") -> EndpointSecret:
    new = NewEndpoint(url=URL, name="hooks", event_types=names or ("*",), tenant=tenant)
    with engine.begin() as connection:
        return endpoints.create(connection, new, reach=PUBLIC)


def heard(engine: Engine, made: EndpointSecret) -> dict[UUID, str]:
    """Types of events by what has ended."""
    query = text("SELECT object_id, event_type FROM webhook_deliveries WHERE endpoint_id = :id")
    with engine.begin() as connection:
        rows = connection.execute(query, {"id": made.endpoint.id}).all()
    assert len(rows) == len({one.object_id for one in rows}), "an end is told of once"
    return {one.object_id: one.event_type for one in rows}


def respond(engine: Engine, job_id: UUID, *, background: bool) -> None:
    """Makes a response of a job."""
    change(
        engine,
        "INSERT INTO responses (job_id, input, options)"
        " VALUES (:id, '[]', jsonb_build_object('background', CAST(:background AS boolean)))",
        id=job_id,
        background=background,
    )


def failed(claimed: Any, state: JobState = JobState.FAILED) -> End:
    return End(job_id=claimed.job_id, fence=claimed.fence, state=state, error={"code": "engine"})


def test_each_end_is_told_of_under_its_own_name(engine: Engine) -> None:
    made = make(engine)
    others = make(engine, tenant="other")
    chosen = make(engine, "response.completed", "job.failed")
    wanted: dict[UUID, str] = {}
    for state in (JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED):
        plain, response = running(engine), running(engine)
        respond(engine, response.job_id, background=True)
        end(engine, failed(plain, state), failed(response, state))
        is_cancel = state is JobState.CANCELLED
        wanted[plain.job_id] = f"job.{state}"
        wanted[response.job_id] = "response.cancelled" if is_cancel else "response.failed"
    for background, reason, event in (
        (None, FinishReason.STOP, "job.succeeded"),
        (False, FinishReason.LENGTH, "job.succeeded"),
        (True, FinishReason.STOP, "response.completed"),
        (True, FinishReason.LENGTH, "response.incomplete"),
    ):
        claimed = running(engine)
        if background is not None:
            respond(engine, claimed.job_id, background=background)
        ended = success(claimed)
        assert ended.result is not None
        result = replace(ended.result, finish_reason=reason)
        end(engine, End(job_id=ended.job_id, fence=ended.fence, state=ended.state, result=result))
        wanted[claimed.job_id] = event
    (waiting,) = submit(engine)
    with engine.begin() as connection:
        jobs.request_cancel(connection, [waiting])
        (refused,) = jobs.insert_failed(
            connection, [FailedRequest(id=new_id(), model="m", error={"code": "invalid_request"})]
        )
    wanted |= {waiting: "job.cancelled", refused: "job.failed"}
    assert heard(engine, made) == wanted
    assert heard(engine, others) == {}
    names = {"response.completed", "job.failed"}
    assert heard(engine, chosen) == {key: one for key, one in wanted.items() if one in names}


def test_a_batch_is_told_of_once_and_its_lines_are_not(engine: Engine) -> None:
    made = make(engine)
    claimed = running(engine)
    batch_id = uuid4()
    values = {"batch": batch_id, "job": claimed.job_id}
    for statement in (
        "INSERT INTO batches (id, tenant_id, endpoint, input_file_id, completion_window, status,"
        " expires_at, num_lines, last_line, next_line, next_byte, first_open, fence)"
        " VALUES (:batch, 'default', '/v1/completions', :batch, '24h', 'in_progress', now(),"
        " 1, 1, 2, 0, 1, 1)",
        "INSERT INTO batch_lines (batch_id, line, job_id, num_jobs, num_choices)"
        " VALUES (:batch, 1, :job, 1, 1)",
    ):
        change(engine, statement, **values)
    end(engine, success(claimed))
    assert heard(engine, made) == {}
    for status in ("finalizing", "completed", "completed"):
        change(engine, "UPDATE batches SET status = :status", status=status)
    assert heard(engine, made) == {batch_id: "batch.completed"}


def test_an_end_that_is_rolled_back_is_not_told_of(engine: Engine) -> None:
    made = make(engine)
    claimed = running(engine)
    with engine.connect() as connection:
        ends.end_running(connection, [success(claimed)])
        connection.rollback()
    assert heard(engine, made) == {}
    end(engine, success(claimed))
    end(engine, success(claimed))
    assert heard(engine, made) == {claimed.job_id: "job.succeeded"}


def claimed_attempts(engine: Engine, **values: Any) -> list[WebhookAttempt]:
    wanted = {"busy": {}, "per_endpoint": 4, "max_rows": 100, "lease_s": 60.0, **values}
    with engine.begin() as connection:
        return webhook_attempts.claim(connection, **wanted)


def record(engine: Engine, attempt: WebhookAttempt, state: Any, **fields: Any) -> list[Any]:
    outcome = AttemptOutcome(
        attempt=attempt,
        **{"state": state, "status_code": None, "error": None, "pause_s": 0.0, **fields},
    )
    with engine.begin() as connection:
        return webhook_attempts.record(connection, [outcome], patience_s=3 * DAY_S)


@pytest.fixture
def waiting(engine: Engine) -> EndpointSecret:
    """An endpoint that is to hear of six jobs."""
    made = make(engine, "job.succeeded")
    end(engine, *(success(running(engine)) for _ in range(6)))
    return made


def test_each_endpoint_has_its_room_and_one_that_fails_one_place(
    engine: Engine, waiting: EndpointSecret
) -> None:
    other = make(engine, "job.succeeded")
    end(engine, success(running(engine)))
    room = {waiting.endpoint.id: 3}
    first = claimed_attempts(engine, busy=room, max_rows=2)
    assert {one.endpoint_id for one in first} == {waiting.endpoint.id, other.endpoint.id}
    attempt = next(one for one in first if one.endpoint_id == waiting.endpoint.id)
    record(engine, attempt, "pending", pause_s=1_000.0)
    assert claimed_attempts(engine, busy={waiting.endpoint.id: 1}) == []
    (second,) = claimed_attempts(engine)
    assert second.id != attempt.id
    record(engine, second, "delivered", status_code=204)
    assert len(claimed_attempts(engine)) == 4, "it takes them again"
    assert claimed_attempts(engine, busy={waiting.endpoint.id: 4}) == []


def test_a_claim_ends_with_its_lease_and_only_a_success_counts_after_that(
    engine: Engine, waiting: EndpointSecret
) -> None:
    (attempt,) = claimed_attempts(engine, max_rows=1)
    change(
        engine,
        "UPDATE webhook_deliveries SET due_at = now() - interval '1 h' WHERE id = :id",
        id=attempt.id,
    )
    (again,) = claimed_attempts(engine, max_rows=1)
    assert (again.id, again.attempt) == (attempt.id, 2)
    record(engine, attempt, "dead", error="late")
    state = "SELECT state FROM webhook_deliveries WHERE id = :id"
    assert cell(engine, state, id=attempt.id) == "pending"
    record(engine, attempt, "delivered")
    assert cell(engine, state, id=attempt.id) == "delivered"
    record(engine, again, "dead")
    assert cell(engine, state, id=attempt.id) == "delivered"


def test_an_endpoint_that_fails_for_days_is_disabled_until_its_owner_enables_it(
    engine: Engine, waiting: EndpointSecret
) -> None:
    wanted: Any = {"endpoint_id": waiting.endpoint.id, "tenant": "default"}
    one, two, *_ = claimed_attempts(engine)
    assert record(engine, one, "pending") == []
    change(engine, "UPDATE webhook_endpoints SET failing_since = now() - interval '4 days'")
    (disabled,) = record(engine, two, "pending")
    assert "no webhook was taken since" in disabled.reason
    assert claimed_attempts(engine) == []
    end(engine, success(running(engine)))
    assert len(heard(engine, waiting)) == 6, "it hears of nothing meanwhile"
    with engine.begin() as connection, pytest.raises(Conflict, match="enable it first"):
        deliveries.replay(connection, **wanted)
    enabled = EndpointChange(enabled=True)
    with engine.begin() as connection:
        found = endpoints.change(connection, wanted=enabled, reach=PUBLIC, **wanted)
    assert (found.disabled_at, found.failing_since) == (None, None)
    assert claimed_attempts(engine), "what waited goes out"


def test_what_nobody_takes_is_given_up_replayed_and_forgotten(
    engine: Engine, waiting: EndpointSecret
) -> None:
    wanted: Any = {"endpoint_id": waiting.endpoint.id, "tenant": "default"}
    change(engine, "UPDATE webhook_deliveries SET due_at = now() - interval '4 days'")
    with engine.begin() as connection:
        assert webhook_attempts.give_up(connection, patience_s=3 * DAY_S) == 6
        page, has_more = deliveries.list_deliveries(connection, state="dead", limit=4, **wanted)
        rest, _ = deliveries.list_deliveries(connection, limit=4, after=page[-1].id, **wanted)
        assert (len(page), has_more, len({one.id for one in (*page, *rest)})) == (4, True, 6)
        assert deliveries.replay(connection, ids=[page[0].id, uuid4()], **wanted) == 1
        assert deliveries.replay(connection, **wanted) == 5
        with pytest.raises(NotFound):
            deliveries.replay(connection, waiting.endpoint.id, tenant="other")
    (attempt, *_) = claimed_attempts(engine)
    record(engine, attempt, "delivered")
    change(engine, "UPDATE webhook_deliveries SET ended_at = ended_at - interval '8 days'")
    with engine.begin() as connection:
        assert webhook_attempts.forget(connection, age_s=7 * DAY_S) == 1


def test_two_secrets_sign_during_a_rotation_and_no_third_one(
    engine: Engine, waiting: EndpointSecret
) -> None:
    wanted: Any = {"endpoint_id": waiting.endpoint.id, "tenant": "default"}
    with engine.begin() as connection:
        new = endpoints.rotate(connection, grace_s=DAY_S, **wanted)
        with pytest.raises(Conflict, match="two secrets"):
            endpoints.rotate(connection, grace_s=DAY_S, **wanted)
    (attempt,) = claimed_attempts(engine, max_rows=1)
    assert attempt.secrets == (new.secret, waiting.secret)
    assert waiting.secret not in repr((attempt, new, waiting, new.endpoint))
    change(engine, "UPDATE webhook_endpoints SET old_secret_until = now()")
    (attempt,) = claimed_attempts(engine, max_rows=1)
    assert attempt.secrets == (new.secret,)
    with engine.begin() as connection:
        last = endpoints.rotate(connection, grace_s=0, **wanted)
    (attempt,) = claimed_attempts(engine, max_rows=1)
    assert attempt.secrets == (last.secret,)


def test_wrong_endpoints_are_refused_and_a_tenant_has_only_so_many(engine: Engine) -> None:
    for fields in (
        {"event_types": ()},
        {"event_types": ("job.done",)},
        {"event_types": ("job",)},
        {"name": ""},
        {"name": "a\0"},
        {"url": "http://10.0.0.1/"},
        {"tenant": ""},
        {"tenant": "a" * 65},
    ):
        good: Any = {"url": URL, "name": "a", "event_types": ("job.*",)}
        with engine.begin() as connection, pytest.raises(Invalid):
            endpoints.create(connection, NewEndpoint(**{**good, **fields}), reach=PUBLIC)
    made = [make(engine) for _ in range(MAX_ENDPOINTS)]
    with pytest.raises(Conflict, match="16"):
        make(engine)
    assert made[0].endpoint.event_types == tuple(EventType)
    with engine.begin() as connection:
        endpoints.delete(connection, made[0].endpoint.id, tenant="default")
        with pytest.raises(NotFound):
            endpoints.delete(connection, made[1].endpoint.id, tenant="other")
    make(engine)
