"""Celery's canvas with our task in it: what follows a job follows its end, once. A foreign app on
real servers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import Celery, chain, chord, group, signature
from celery.exceptions import TaskRevokedError

from shardline.contract.job import JobState
from shardline_server.failpoints import Point
from tests.chaos.faults.arming import arm
from tests.integration.relay.foreign_stack import ForeignStack, foreign_stack
from tests.integration.relay.relay_stack import PATIENCE_S
from tests.polling import until

TEXT = "done"
"""What the played head completes everything with."""


@pytest.fixture
def here(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[ForeignStack]:
    """With a relay; Redis is broker and result backend of both."""
    (tmp_path / "failpoints").mkdir()
    with foreign_stack(
        database_url,
        redis_url,
        tmp_path,
        backend=redis_url,
        foreign_backend=redis_url,
        SHARDLINE_FAILPOINTS=str(tmp_path / "failpoints"),
    ) as here:
        here.relays.start_relay()
        yield here


def submit(app: Celery, *args: Any, **fields: Any) -> Any:
    return app.signature(
        "shardline.submit", args=args, kwargs={"model": "m", **fields}, queue="shardline.intake"
    )


def foreign(app: Celery, name: str, *args: Any) -> Any:
    return app.signature(f"foreign.{name}", args=args)


def texts(value: Any) -> Any:
    return [one["text"] for one in value]


def test_the_next_task_of_a_chain_gets_the_completion_when_the_job_ends(here: ForeignStack) -> None:
    last = chain(submit(here.app, "one"), foreign(here.app, "take")).apply_async()
    (job_id,) = here.complete()
    value = last.get(timeout=PATIENCE_S)
    assert (value["id"], value["text"], value["token_ids"]) == (str(job_id), TEXT, [7, 8])
    assert value["usage"] == {"prompt_tokens": 2, "completion_tokens": 2}
    assert here.calls() == [["take", value]]


def test_a_job_in_a_chain_completes_the_text_of_the_task_before_it(here: ForeignStack) -> None:
    last = chain(
        foreign(here.app, "say", "two"), submit(here.app), submit(here.app, max_tokens=2)
    ).apply_async()
    first, second = here.complete(2)
    assert last.get(timeout=PATIENCE_S)["text"] == TEXT
    prompts = [
        job.prompt for job_id in (first, second) if (job := here.relays.job(job_id)) is not None
    ]
    assert prompts == ["two", TEXT]


def test_links_and_groups_of_links_are_called_once_each(here: ForeignStack) -> None:
    linked = submit(here.app, "one")
    linked.link(foreign(here.app, "take"))
    linked.link(chain(foreign(here.app, "say"), foreign(here.app, "also_take")))
    linked.link(group(foreign(here.app, "take"), foreign(here.app, "also_take")))
    linked.apply_async()
    here.complete()
    here.wait_for_calls(4)
    here.wait_until_settled()
    assert sorted(name for name, _ in here.calls()) == ["also_take", "also_take", "take", "take"]


def test_errbacks_of_failed_refused_expired_and_cancelled_jobs_are_called_once(
    here: ForeignStack,
) -> None:
    ids = {kind: str(uuid4()) for kind in ("failed", "refused", "no row", "expired", "cancelled")}
    fields: dict[str, dict[str, Any]] = {
        "failed": {"prompt": "one"},
        "refused": {"prompt": "one", "top_p": 9},
        "no row": {"prompt": "one", "model": None},
        "expired": {"prompt": "one", "delay_s": 100, "deadline_s": 0.01},
        "cancelled": {"prompt": "one", "delay_s": 100},
    }
    for kind, task_id in ids.items():
        submit(here.app, **fields[kind]).on_error(foreign(here.app, "blame")).apply_async(
            task_id=task_id, link=foreign(here.app, "take")
        )
    here.fail_next()
    here.relays.wait_for(ids["cancelled"], lambda job: job.state is JobState.QUEUED)
    here.app.control.revoke(ids["cancelled"])
    calls = here.wait_for_calls(len(ids))
    here.wait_until_settled()
    assert sorted(calls) == sorted(["blame", task_id] for task_id in ids.values())
    assert here.calls() == calls


def test_a_chain_whose_job_does_not_succeed_ends_for_those_who_wait(here: ForeignStack) -> None:
    failed = chain(submit(here.app, "one"), foreign(here.app, "take")).apply_async()
    here.fail_next()
    with pytest.raises(Exception, match="it broke") as caught:
        failed.get(timeout=PATIENCE_S)
    assert type(caught.value).__name__ == "JobFailed"
    late = chain(
        submit(here.app, "one", delay_s=100, deadline_s=0.01), foreign(here.app, "take")
    ).apply_async()
    with pytest.raises(TaskRevokedError, match="expired"):
        late.get(timeout=PATIENCE_S)
    assert here.calls() == []


def test_a_chord_of_jobs_and_other_tasks_calls_its_body_with_all_values(here: ForeignStack) -> None:
    parts = [submit(here.app, "one"), foreign(here.app, "say", "two"), submit(here.app, "three")]
    body = chord(parts)(foreign(here.app, "take"))
    here.complete(2)
    first, second, third = body.get(timeout=PATIENCE_S)
    assert (first["text"], second, third["text"]) == (TEXT, "two", TEXT)
    here.wait_until_settled()
    assert len(here.calls()) == 1


def test_a_job_as_the_body_of_a_chord_completes_what_its_parts_said(here: ForeignStack) -> None:
    parts = [submit(here.app, "one"), foreign(here.app, "say", "two")]
    body = chord(parts)(submit(here.app))
    here.complete()
    (job_id,) = here.complete()
    assert body.get(timeout=PATIENCE_S)["text"] == TEXT
    assert (job := here.relays.job(job_id)) is not None
    assert job.prompt == f"{TEXT}\n\ntwo"


def test_a_failed_part_fails_its_chord(here: ForeignStack) -> None:
    body = chord([submit(here.app, "one"), submit(here.app, "two", top_p=9)])(
        foreign(here.app, "take")
    )
    here.complete()
    with pytest.raises(Exception, match="top_p"):
        body.get(timeout=PATIENCE_S)
    assert here.calls() == []


def test_groups_in_chains_and_chains_in_groups_give_their_values(here: ForeignStack) -> None:
    nested = chain(
        foreign(here.app, "say", "one"),
        group(submit(here.app), chain(submit(here.app), foreign(here.app, "take"))),
        foreign(here.app, "also_take"),
    ).apply_async()
    here.complete(2)
    nested.get(timeout=PATIENCE_S)
    here.wait_until_settled()
    (_, taken), (_, joined) = here.calls()
    assert (taken["text"], texts(joined)) == (TEXT, [TEXT, TEXT])
    whole = group(submit(here.app, "one"), submit(here.app, "two")).apply_async()
    here.complete(2)
    assert texts(whole.get(timeout=PATIENCE_S)) == [TEXT, TEXT]


def test_a_task_that_is_replaced_by_a_job_has_its_completion(here: ForeignStack) -> None:
    result = chain(foreign(here.app, "replaced", "one"), foreign(here.app, "take")).apply_async()
    here.complete()
    assert result.get(timeout=PATIENCE_S)["text"] == TEXT
    assert result.parent.get(timeout=PATIENCE_S)["text"] == TEXT


@pytest.mark.parametrize("kind", ["link", "chain", "chord", "errback"])
def test_a_relay_killed_between_calling_back_and_noting_it_calls_nothing_twice(
    here: ForeignStack, tmp_path: Path, kind: str
) -> None:
    job = submit(here.app, "one")
    task_id = str(uuid4())
    arming = arm(tmp_path / "failpoints", Point.TASK_ENDED)
    if kind == "link":
        job.apply_async(
            link=[foreign(here.app, "take"), foreign(here.app, "say", "x")], task_id=task_id
        )
    elif kind == "chain":
        chain(job, foreign(here.app, "take")).apply_async()
    elif kind == "chord":
        chord([job, submit(here.app, "two")])(foreign(here.app, "take"))
    else:
        job.apply_async(link_error=foreign(here.app, "blame"), task_id=task_id)
    if kind == "errback":
        here.fail_next()
    else:
        here.complete(2 if kind == "chord" else 1)
    arming.wait(timeout_s=PATIENCE_S)
    here.end_leases()
    here.relays.start_relay()
    here.wait_until_settled()
    assert len(here.wait_for_calls(1)) == 1


def test_jobs_that_end_while_no_relay_runs_are_followed_when_one_comes(here: ForeignStack) -> None:
    last = chain(submit(here.app, "one"), foreign(here.app, "take")).apply_async()
    (sent,) = here.relays.take_messages(1)
    here.relays.relays[0].kill()
    here.finish(UUID(sent))
    here.relays.start_relay()
    assert last.get(timeout=PATIENCE_S)["text"] == TEXT
    here.wait_until_settled()
    assert len(here.calls()) == 1


def test_a_message_that_comes_twice_is_followed_once(here: ForeignStack) -> None:
    task_id = str(uuid4())
    for _ in range(2):
        submit(here.app, "one").apply_async(task_id=task_id, link=foreign(here.app, "take"))
    here.complete()
    here.wait_for_calls(1)
    submit(here.app, "one").apply_async(task_id=task_id, link=foreign(here.app, "take"))
    marker = submit(here.app, "two").apply_async()
    here.complete()
    marker.get(timeout=PATIENCE_S)
    here.wait_until_settled()
    assert len(here.calls()) == 1


def test_what_is_linked_to_a_task_is_refused_where_it_cannot_be_kept(here: ForeignStack) -> None:
    large = foreign(here.app, "take", "x" * (1 << 20))
    refused = submit(here.app, "one").apply_async(link=large)
    with pytest.raises(Exception, match="longer than"):
        refused.get(timeout=PATIENCE_S)
    no_signature = here.app.send_task(
        "shardline.submit",
        kwargs={"model": "m", "prompt": "one"},
        queue="shardline.intake",
        link=[signature("x")],
    )
    here.complete()
    assert no_signature.get(timeout=PATIENCE_S)["text"] == TEXT
    until(lambda: here.relays.redis.llen("celery") == 0)


def test_a_callback_that_can_never_be_sent_holds_up_no_result_and_no_other_task(
    here: ForeignStack,
) -> None:
    never = foreign(here.app, "take").set(serializer="no such serializer")
    result = submit(here.app, "one").apply_async(link=never)
    other = chain(submit(here.app, "two"), foreign(here.app, "take")).apply_async()
    here.complete(2)
    assert other.get(timeout=PATIENCE_S)["text"] == TEXT
    assert result.get(timeout=PATIENCE_S)["text"] == TEXT
    assert len(here.calls()) == 1


def test_a_link_whose_value_looks_like_kombus_is_sent_as_it_is(here: ForeignStack) -> None:
    odd = {"__type__": "no such type", "__value__": 1}
    link = foreign(here.app, "take", odd).set(queue="elsewhere")
    result = submit(here.app, "one").apply_async(link=link)
    other = submit(here.app, "two").apply_async()
    here.complete(2)
    assert [one.get(timeout=PATIENCE_S)["text"] for one in (result, other)] == [TEXT] * 2
    here.wait_until_settled()
    (sent,) = here.relays.redis.lrange("elsewhere", 0, -1)
    (value, given), *_ = json.loads(base64.b64decode(json.loads(sent)["body"]))
    assert (value["text"], given) == (TEXT, odd)
