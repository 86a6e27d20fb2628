"""The relay's receive from Celery's queue: a message is in its queue or among the unacknowledged,
at any moment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any
from uuid import uuid4

import pytest
from kombu.connection import Connection
from kombu.entity import Queue
from kombu.messaging import Consumer
from redis import Redis

from services.relay.celery import atomic_transport
from services.relay.celery.atomic_transport import WAIT_S, AtomicTransport
from tests.polling import until

QUEUE = "asked"
UNACKED = "taken"
OPTIONS = {
    "unacked_key": UNACKED,
    "unacked_index_key": f"{UNACKED}_index",
    "unacked_mutex_key": f"{UNACKED}_mutex",
    "visibility_timeout": 0.2,
    "unacked_restore_limit": None,
}


class Killed(BaseException):
    """Stands for a SIGKILL: nothing catches it, and nothing is done after it."""


@contextmanager
def connected(redis_url: str) -> Iterator[Connection]:
    with closing(
        Connection(redis_url, transport=AtomicTransport, transport_options=OPTIONS)
    ) as connection:
        yield connection


@contextmanager
def consuming(redis_url: str, callback: Any) -> Iterator[Connection]:
    with (
        connected(redis_url) as connection,
        Consumer(connection.channel(), [Queue(QUEUE)], callbacks=[callback], accept=["json"]),
    ):
        yield connection


def send(redis_url: str, body: object, **options: Any) -> None:
    with connected(redis_url) as connection, connection.Producer() as producer:
        producer.publish(
            body, serializer="json", routing_key=QUEUE, declare=[Queue(QUEUE)], **options
        )


def received(redis_url: str, num: int) -> list[object]:
    """What a consumer gets that acknowledges, in order."""
    found: list[object] = []

    def take(body: object, message: Any) -> None:
        message.ack()
        found.append(body)

    with consuming(redis_url, take) as connection:

        def drained() -> bool:
            with suppress(TimeoutError):
                # Shorter than a wait of the channel: kombu puts messages back where nothing came.
                connection.drain_events(timeout=WAIT_S / 2)
            return len(found) >= num

        until(drained, timeout_s=30)
    return found


def left(redis_url: str) -> tuple[int, int]:
    """Messages in the queue, and unacknowledged ones."""
    with Redis.from_url(redis_url) as redis:
        return redis.llen(QUEUE), redis.hlen(UNACKED)


def test_messages_come_in_order_and_the_urgent_ones_first(redis_url: str) -> None:
    for body in ("one", "two"):
        send(redis_url, body)
    send(redis_url, "later", priority=9)
    assert received(redis_url, 3) == ["one", "two", "later"]
    assert left(redis_url) == (0, 0)


def test_a_message_of_lower_priority_alone_is_received(redis_url: str) -> None:
    send(redis_url, "later", priority=6)
    assert received(redis_url, 1) == ["later"]


def test_priorities_of_an_app_with_another_separator_are_received(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of Celery's documentation.
    options = {"priority_steps": list(range(10)), "sep": ":", "queue_order_strategy": "priority"}
    with (
        closing(Connection(redis_url, transport_options=options)) as app,
        app.Producer() as producer,
    ):
        for priority in (9, 3, 0):
            body = {"priority": priority}
            producer.publish(body, routing_key=QUEUE, declare=[Queue(QUEUE)], priority=priority)
    with Redis.from_url(redis_url) as redis:
        assert redis.llen(f"{QUEUE}:3") == redis.llen(f"{QUEUE}:9") == 1

    monkeypatch.setitem(OPTIONS, "priority_steps", list(range(10)))
    assert received(redis_url, 3) == [{"priority": step} for step in (0, 3, 9)]
    assert left(redis_url) == (0, 0)


@pytest.mark.parametrize("key", [QUEUE, f"{QUEUE}\x06\x163"])
def test_a_key_of_the_wrong_type_is_moved_aside_whole(redis_url: str, key: str) -> None:
    with Redis.from_url(redis_url) as redis:
        redis.xadd(key, {"kept": "yes"})
        with consuming(redis_url, lambda *_: None) as connection:

            def moved() -> Any:
                with suppress(TimeoutError):
                    connection.drain_events(timeout=WAIT_S / 2)
                return redis.keys(f"{key}:wrong:*")

            (aside,) = until(moved, timeout_s=30)
        assert redis.xlen(aside) == 1
        assert not redis.exists(key)
    send(redis_url, "good", priority=3)
    assert received(redis_url, 1) == ["good"]


def take_and_die(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker does that is killed between a message's receipt and its delivery."""

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched, consuming(redis_url, die) as connection:
        patched.setattr(atomic_transport, "failpoint", die)
        with pytest.raises(Killed):
            until(lambda: connection.drain_events(timeout=10))
        # The channel puts nothing back when it is closed.
        patched.setattr(
            connection.default_channel.qos, "restore_unacked_once", lambda *_, **__: None
        )


def test_a_worker_killed_with_a_message_in_its_hands_leaves_it_to_the_next(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(redis_url, "one")
    take_and_die(redis_url, monkeypatch)
    assert left(redis_url) == (0, 1)
    assert received(redis_url, 1) == ["one"]
    assert left(redis_url) == (0, 0)


def test_a_message_that_no_worker_can_read_ends_none_that_starts(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(redis_url, "bad", headers={"of": "no uuid"})
    with Redis.from_url(redis_url) as redis:
        envelope: Any = redis.lindex(QUEUE, 0)
        unreadable = json.dumps({"__type__": "uuid", "__value__": {"hex": 5}})
        redis.lset(QUEUE, 0, envelope.decode().replace('"no uuid"', unreadable))
    take_and_die(redis_url, monkeypatch)
    assert left(redis_url) == (0, 1)

    with consuming(redis_url, lambda *_: None) as connection:

        def is_back() -> bool:
            with suppress(TimeoutError):
                connection.drain_events(timeout=WAIT_S / 2)
            return False

        with pytest.raises(AttributeError, match="replace"):
            until(is_back, timeout_s=30)
    assert left(redis_url) == (0, 0)


def test_a_message_nested_beyond_pythons_limit_ends_none_that_starts(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(redis_url, "deep", headers={"of": "no list"})
    with Redis.from_url(redis_url) as redis:
        envelope: Any = redis.lindex(QUEUE, 0)
        # Lua's reader takes 1,000 levels.
        nested = "[" * 990 + "]" * 990
        redis.lset(QUEUE, 0, envelope.decode().replace('"no list"', nested))
    take_and_die(redis_url, monkeypatch)
    assert left(redis_url) == (0, 1)

    with consuming(redis_url, lambda *_: None) as connection:

        def is_dropped() -> bool:
            with suppress(TimeoutError):
                connection.drain_events(timeout=WAIT_S / 2)
            return left(redis_url) == (0, 0)

        until(is_dropped, timeout_s=30)
    send(redis_url, "good")
    assert received(redis_url, 1) == ["good"]


@pytest.mark.parametrize("kind", ["no envelope", "no tag"])
def test_a_message_that_ends_in_an_error_does_not_come_again(redis_url: str, kind: str) -> None:
    send(redis_url, "good")
    with Redis.from_url(redis_url) as redis:
        envelope: Any = redis.lindex(QUEUE, 0)
        document = json.loads(envelope)
        document["properties"]["delivery_tag"] = str(uuid4())
        if kind == "no tag":
            del document["properties"]["delivery_tag"]
        text = "what is this" if kind == "no envelope" else json.dumps(document)
        redis.delete(QUEUE)
        redis.rpush(QUEUE, text)

    def refuse(*_: object) -> None:
        raise ValueError("no such thing")

    with consuming(redis_url, refuse) as connection:
        with pytest.raises((ValueError, KeyError)):
            until(lambda: connection.drain_events(timeout=10))
        assert left(redis_url) == (0, 0)


def forge(redis_url: str, queue: str, **properties: object) -> None:
    """Changes what the one message in a queue says of itself."""
    with Redis.from_url(redis_url) as redis:
        envelope: Any = redis.lindex(queue, 0)
        document = json.loads(envelope)
        document["properties"] |= properties
        redis.lset(queue, 0, json.dumps(document))


def test_a_message_goes_back_to_where_it_was_and_not_where_it_says(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = {"exchange": "", "routing_key": "elsewhere"}
    send(redis_url, "one")
    forge(redis_url, QUEUE, delivery_info=elsewhere)
    take_and_die(redis_url, monkeypatch)
    assert received(redis_url, 1) == ["one"]

    send(redis_url, "two")
    forge(redis_url, QUEUE, delivery_info=elsewhere)
    requeued: list[object] = []

    def requeue(body: object, message: Any) -> None:
        assert message.delivery_info == {"exchange": "", "routing_key": QUEUE}
        requeued.append(body)
        message.requeue()

    with consuming(redis_url, requeue) as connection:
        until(lambda: connection.drain_events(timeout=10) is None)
    assert requeued == ["two"]
    assert received(redis_url, 1) == ["two"]
    with Redis.from_url(redis_url) as redis:
        assert not redis.exists("elsewhere")


def test_two_messages_with_one_tag_are_both_kept(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for body in ("one", "two"):
        send(redis_url, body)
        forge(redis_url, QUEUE, delivery_tag="mine")
        take_and_die(redis_url, monkeypatch)
    assert left(redis_url) == (0, 2)
    assert sorted(map(str, received(redis_url, 2))) == ["one", "two"]


def test_a_full_queue_of_urgent_messages_holds_up_no_other(redis_url: str) -> None:
    for number in range(3):
        send(redis_url, f"urgent {number}", priority=0)
    with connected(redis_url) as connection, connection.Producer() as producer:
        for number in range(2):
            other = Queue("other")
            body = f"other {number}"
            producer.publish(
                body, serializer="json", routing_key="other", declare=[other], priority=9
            )
    found: list[object] = []

    def take(body: object, message: Any) -> None:
        message.ack()
        found.append(body)

    queues = [Queue(QUEUE), Queue("other")]
    with (
        connected(redis_url) as connection,
        Consumer(connection.channel(), queues, callbacks=[take], accept=["json"]),
    ):
        while len(found) < 5:
            connection.drain_events(timeout=10)
    assert found == ["urgent 0", "other 0", "urgent 1", "other 1", "urgent 2"]
