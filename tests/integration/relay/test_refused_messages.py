"""The Celery door's queue, poisoned: the relay lives, and each bad message is kept with its
reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery.canvas import Signature, chunks, xmap, xstarmap

from shardline.contract.keys import INTAKE, RELAY_UNACKED
from shardline.contract.queues import INTAKE_QUEUE, SUBMIT_TASK
from tests.integration.relay.relay_stack import PATIENCE_S, RelayStack, relay_stack
from tests.integration.rows import MODEL
from tests.poisoned_messages import SECRET, envelope, poisons
from tests.polling import until

POISONS = poisons(SUBMIT_TASK, INTAKE_QUEUE)


@pytest.fixture
def here(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[RelayStack]:
    """Servers without a relay."""
    with relay_stack(database_url, redis_url, tmp_path) as here:
        yield here


def test_no_message_ends_a_relay_and_each_bad_one_is_kept_with_its_reason(here: RelayStack) -> None:
    relay = here.start_relay()
    good = [str(uuid4()) for _ in POISONS]
    for job_id, poison in zip(good, POISONS.values(), strict=True):
        here.redis.lpush(INTAKE_QUEUE, poison)
        body = [[], {"model": MODEL, "prompt": "one"}, {}]
        here.redis.lpush(
            INTAKE_QUEUE, json.dumps(envelope(SUBMIT_TASK, INTAKE_QUEUE, body, job_id))
        )

    for job_id in good:
        here.wait_for(job_id, lambda job: job.state == "queued")
    until(lambda: len(here.dead_letters()) >= len(POISONS))
    assert len(here.dead_letters()) == len(POISONS)
    for _, dead in here.dead_letters():
        reason = json.loads(dead[b"reason"])
        assert reason["code"] == "invalid_request"
        assert reason["field"], "of the message, or of the request that it holds"
        assert reason["problem"]
    assert here.redis.llen(INTAKE_QUEUE) == 0
    until(lambda: here.redis.hlen(RELAY_UNACKED) == 0)
    assert relay.process.poll() is None
    assert relay.stop() == 0
    assert SECRET.encode() not in relay.log.read_bytes()


def test_a_broken_control_message_does_not_end_a_relay(here: RelayStack) -> None:
    relay = here.start_relay()
    for poison in POISONS.values():
        here.redis.publish("/0.celery.pidbox", poison)
    job_id = here.submit({"model": MODEL, "prompt": "one"})

    here.wait_for(job_id, lambda job: job.state == "queued")

    assert relay.process.poll() is None


def test_the_sender_of_an_unknown_task_gets_a_failure(here: RelayStack) -> None:
    here.start_relay()
    with here.app.connection_for_write() as connection:
        sent = here.app.send_task(
            "shardline.sumbit", task_id=str(uuid4()), queue=INTAKE_QUEUE, connection=connection
        )
    with pytest.raises(Exception, match=r"shardline\.sumbit"):
        here.app.AsyncResult(sent.id).get(timeout=PATIENCE_S)


def test_keys_of_the_wrong_type_stop_neither_door(here: RelayStack) -> None:
    here.redis.xadd(INTAKE_QUEUE, {"kept": "yes"})
    here.redis.lpush(INTAKE, "kept")
    relay = here.start_relay()
    until(lambda: here.redis.keys(f"{INTAKE_QUEUE}:wrong:*"))
    until(lambda: here.redis.keys(f"{INTAKE}:wrong:*"))

    document = {"model": MODEL, "prompt": "one"}
    asked = [here.submit(document), str(uuid4())]
    here.redis.xadd(INTAKE, {"request": json.dumps({"id": asked[1], **document})})
    for job_id in asked:
        here.wait_for(job_id, lambda job: job.state == "queued")
    (aside,) = here.redis.keys(f"{INTAKE}:wrong:*")
    assert here.redis.lrange(aside, 0, -1) == [b"kept"]
    log = relay.log.read_text()
    assert "unreachable" not in log
    assert log.count("a key of the wrong type is moved aside") == 2


PROMPTS = [("one", "m"), ("two", "m")]
BUILT_IN: dict[str, Callable[[Signature], Any]] = {
    "celery.map": lambda ours: xmap(ours, PROMPTS, app=ours.app),
    "celery.starmap": lambda ours: xstarmap(ours, PROMPTS, app=ours.app),
    "celery.chunks": lambda ours: chunks(ours, PROMPTS, 1, app=ours.app).group(),
    "celery.backend_cleanup": lambda ours: ours.app.signature("celery.backend_cleanup"),
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_task_of_celerys_own_is_refused_with_its_prompts(here: RelayStack, name: str) -> None:
    here.start_relay()
    signature = BUILT_IN[name](here.app.signature(SUBMIT_TASK))
    with here.app.connection_for_write() as connection:
        sent = signature.apply_async(queue=INTAKE_QUEUE, connection=connection)
    first = (sent.results or [sent])[0] if hasattr(sent, "results") else sent

    with pytest.raises(Exception, match=rf"is no task {SUBMIT_TASK}"):
        first.get(timeout=PATIENCE_S)
    assert first.id.encode() in {dead[b"entry"] for _, dead in here.dead_letters()}
    if name != "celery.backend_cleanup":
        assert b"one" in b"".join(dead[b"request"] for _, dead in here.dead_letters())
