"""What a relay's doors make of any document, on a real Postgres: one result each, and no batch is
held up."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from services.relay.submission import Submission, SubmissionResult, store_submissions
from shardline.contract.ids import derived_id, former_id, new_id
from shardline.store.tenants import quotas
from tests.integration.rows import MODEL, cell

GOOD = {"model": MODEL, "prompt": "one"}
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
fields = st.sampled_from(
    ["id", "prompt", "messages", "metadata", "seed", "priority", "tenant", "stop", "deadline_s"]
)


def take(engine: Engine, *requests: object) -> list[SubmissionResult]:
    """Documents as one batch."""
    return store_submissions(
        engine, [Submission(id=new_id(), document=document) for document in requests]
    )


def nested(depth: int) -> Any:
    """An object inside an object inside …"""
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tenant": "nobody"}, "tenant"),
        ({"prompt": "a\0"}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"metadata": nested(500)}, "metadata"),
        ({"metadata": {"score": float("inf")}}, "metadata.score"),
        ({"traceparent": "x" * 300}, "traceparent"),
        ({"seed": 2**63}, "seed"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_one_bad_request_in_a_batch_fails_alone(
    engine: Engine, change: dict[str, Any], field: str
) -> None:
    before, bad, after = take(engine, GOOD, {**GOOD, **change}, GOOD)
    assert (before.status, bad.status, after.status) == ("accepted", "failed", "accepted")
    assert cell(engine, "SELECT error->>'field' FROM jobs WHERE state = 'failed'") == field
    assert cell(engine, "SELECT count(*) FROM jobs WHERE state = 'queued'") == 2


@pytest.mark.parametrize(
    "document", [None, [], "text", {}, {"prompt": "one"}, {"model": 7}, {**GOOD, "id": "no uuid"}]
)
def test_a_document_that_no_row_can_hold_is_rejected_with_a_reason(
    engine: Engine, document: object
) -> None:
    good, dead = take(engine, GOOD, document)
    assert (good.status, dead.status) == ("accepted", "rejected")
    assert dead.reason is not None
    assert cell(engine, "SELECT count(*) FROM jobs") == 1


def test_a_conflict_in_a_batch_leaves_the_first_job_as_it_is(engine: Engine) -> None:
    first = str(new_id())
    results = take(
        engine,
        {**GOOD, "id": first},
        {**GOOD, "id": first, "prompt": "two"},
        {**GOOD, "id": first, "top_p": 9},
    )
    assert [result.status for result in results] == ["accepted", "rejected", "rejected"]
    assert (
        cell(engine, "SELECT prompt || ' ' || state FROM jobs WHERE id = :id", id=UUID(first))
        == "one queued"
    )


@pytest.mark.parametrize(
    "content", [{"prompt": "one"}, {"messages": [{"role": "user", "content": "hi"}]}]
)
@pytest.mark.parametrize("key", [{}, {"idempotency_key": "k"}])
def test_a_request_delivered_twice_is_accepted_twice_and_stored_once(
    engine: Engine, content: dict[str, Any], key: dict[str, Any]
) -> None:
    submission = Submission(
        id=new_id(), document={"model": MODEL, "temperature": 0.5, **content, **key}
    )
    assert [result.status for _ in "ab" for result in store_submissions(engine, [submission])] == [
        "accepted",
        "accepted",
    ]
    assert cell(engine, "SELECT count(*) FROM jobs") == 1


def test_both_deliveries_of_an_invalid_request_say_the_same(engine: Engine) -> None:
    submission = Submission(id=new_id(), document={**GOOD, "top_p": 9})
    assert store_submissions(engine, [submission]) == store_submissions(engine, [submission])
    assert cell(engine, "SELECT count(*) FROM jobs") == 1


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=fields, value=documents)
def test_any_value_in_any_field_leaves_the_next_request_accepted(
    engine: Engine, field: str, value: object
) -> None:
    beside, strange = take(engine, GOOD, {**GOOD, field: value})
    assert beside.status == "accepted"
    assert strange.status in ("accepted", "failed", "rejected")


def test_what_a_relay_of_the_release_before_stored_is_not_stored_again(engine: Engine) -> None:
    now = Submission(id=derived_id("order"), former_id=former_id("order"), document=GOOD)
    before = Submission(id=former_id("order"), document=GOOD)
    assert [one.status for one in store_submissions(engine, [before])] == ["accepted"]

    assert [one.status for one in store_submissions(engine, [now])] == ["accepted"]

    assert cell(engine, "SELECT count(*) FROM jobs") == 1


def test_another_tenant_that_knows_the_former_id_holds_nothing_up(engine: Engine) -> None:
    with engine.begin() as connection:
        quotas.add_tenant(connection, "acme")
    theirs = Submission(id=former_id("order"), document={**GOOD, "tenant": "acme"})
    mine = Submission(id=derived_id("order"), former_id=former_id("order"), document=GOOD)

    for submission in (theirs, mine):
        assert [one.status for one in store_submissions(engine, [submission])] == ["accepted"]

    assert cell(engine, "SELECT count(*) FROM jobs") == 2
