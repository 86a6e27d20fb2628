"""A relay as a process: it does not outlive a thread of its own, and its log holds no prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.contract.queues import INTAKE_QUEUE
from shardline_server.host.threads import HUNG_STATUS
from tests.integration.relay.relay_stack import PATIENCE_S, RelayStack, relay_stack
from tests.integration.rows import MODEL
from tests.polling import until

SECRET = "nobody else may read this"
PANICKING = """
from services.relay import sweeper

class Panic(BaseException):
    pass

def turn(self):
    raise Panic("as a panic of a library in Rust")

sweeper.Sweeper.turn = turn
from services.relay.__main__ import main
main()
"""


@pytest.fixture
def here(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[RelayStack]:
    """Servers without a relay."""
    with relay_stack(database_url, redis_url, tmp_path) as here:
        yield here


def test_a_relay_ends_when_one_of_its_loops_has_gone(here: RelayStack) -> None:
    relay = here.start_relay(wait=False, program=("-c", PANICKING))
    assert relay.process.wait(PATIENCE_S) == HUNG_STATUS
    assert b"the thread sweeper failed" in relay.log.read_bytes()


def test_prompts_of_refused_messages_are_not_logged(here: RelayStack) -> None:
    relay = here.start_relay(program=("-m", "services.relay"))
    document = {"model": MODEL, "prompt": SECRET}
    with here.app.connection_for_write() as connection:
        here.app.send_task(
            "shardline.sumbit", kwargs=document, queue=INTAKE_QUEUE, connection=connection
        )
        with here.app.amqp.Producer(connection) as producer:
            for body, headers in (
                (f"[{SECRET}", {"task": "shardline.submit", "id": "1"}),
                ("[]", {"argsrepr": SECRET}),
            ):
                producer.publish(
                    body,
                    routing_key=INTAKE_QUEUE,
                    headers=headers,
                    content_type="application/json",
                    content_encoding="utf-8",
                )
    until(lambda: b"shardline.sumbit" in relay.log.read_bytes())
    here.submit({**document, "no such field": SECRET})
    job_id = here.submit(document)
    here.wait_for(job_id, lambda job: job.state == "queued")

    assert relay.stop() == 0
    assert SECRET.encode() not in relay.log.read_bytes()
