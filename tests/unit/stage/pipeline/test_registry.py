"""Cards appear in a real Redis, follow their stage's binding, and outlive the loss of all keys."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest
import redis
from msgspec.structs import replace

from services.stage.hop.sockets import Sockets
from services.stage.pipeline.registry import Announcer, RedisRegistry
from services.standalone.servers import Valkey
from shardline.base.errors import Unavailable
from shardline.contract import keys
from shardline.contract.wire import StageCard, encode_card
from tests.links import NUM_LAYERS, PATIENCE_S, make_card, open_pipes


@pytest.fixture
def registry(redis_url: str) -> Iterator[RedisRegistry]:
    registry = RedisRegistry(redis_url)
    yield registry
    registry.close()


def test_announced_cards_are_listed_by_model(registry: RedisRegistry) -> None:
    card = make_card(0, 8)
    other = make_card(0, 8, model="other")
    registry.announce(card)
    registry.announce(other)

    assert registry.cards("tiny") == [card]
    assert {entry.incarnation for entry in registry.cards()} == {
        card.incarnation,
        other.incarnation,
    }


def test_a_card_expires_unless_renewed(registry: RedisRegistry, redis_url: str) -> None:
    card = make_card(0, 8)
    registry.announce(card)

    with redis.Redis.from_url(redis_url) as client:
        assert 0 < client.ttl(keys.stage_entry(card.incarnation)) <= keys.REGISTRY_TTL_S


def test_what_is_no_card_is_passed_over(registry: RedisRegistry, redis_url: str) -> None:
    card = make_card(0, 8)
    registry.announce(card)
    with redis.Redis.from_url(redis_url) as client:
        client.set(keys.stage_entry("broken"), b"\xff{")
        client.set(keys.stage_entry("no text"), encode_card(card).replace(b"tiny", b"t\xffny"))
        client.lpush(keys.stage_entry("a list"), "x")

    assert registry.cards("tiny") == [card]


NUM_STREAMS = 30_000
"""Keys of jobs; so many that a few calls cannot pass over them."""


@pytest.fixture
def busy_client(redis_url: str) -> Iterator[redis.Redis]:
    """A Redis with many jobs."""
    with redis.Redis.from_url(redis_url) as client:
        client.mset({keys.job_stream(f"{number}"): "" for number in range(NUM_STREAMS)})
        yield client


def num_calls(client: redis.Redis) -> int:
    """All commands so far."""
    return int(client.info("stats")["total_commands_processed"])


def test_cards_are_found_at_once_among_any_number_of_streams(
    registry: RedisRegistry, busy_client: redis.Redis
) -> None:
    card = make_card(0, 8)
    registry.announce(card)
    before = num_calls(busy_client)

    assert registry.cards("tiny") == [card]
    assert num_calls(busy_client) - before < NUM_STREAMS / 500


def test_a_stage_that_died_is_taken_from_the_list(registry: RedisRegistry, redis_url: str) -> None:
    card = make_card(0, 8)
    registry.announce(card)
    with redis.Redis.from_url(redis_url) as client:
        client.delete(keys.stage_entry(card.incarnation))

        assert registry.cards() == []
        assert client.scard(keys.STAGES) == 0
        registry.announce(card)
        assert 0 < client.ttl(keys.STAGES) <= keys.STAGES_TTL_S


def test_an_absent_redis_is_unavailable() -> None:
    registry = RedisRegistry("redis://127.0.0.1:1/0")

    with pytest.raises(Unavailable, match="Redis unreachable"):
        registry.cards("tiny")
    with pytest.raises(Unavailable, match="Redis unreachable"):
        registry.announce(make_card(0, 8))


class AnnouncedCard:
    """A stage's card that an announcer asks for. Asking again means that the card before has been
    dealt with."""

    def __init__(self, registry: RedisRegistry) -> None:
        self.card = make_card(8, NUM_LAYERS)
        self._asked: queue.Queue[None] = queue.Queue()
        self.announcer = Announcer(registry, self._answer)

    def settle(self) -> None:
        """Until the card as it is now has been put up, or tried to."""
        for _ in range(3):
            self.announcer.touch()
            self._asked.get(timeout=PATIENCE_S)

    def _answer(self) -> StageCard:
        self._asked.put(None)
        return self.card


@pytest.fixture
def announced(registry: RedisRegistry) -> Iterator[AnnouncedCard]:
    announced = AnnouncedCard(registry)
    announced.announcer.start()
    yield announced
    announced.announcer.stop()


def test_a_changed_card_is_put_up_at_once(
    registry: RedisRegistry, announced: AnnouncedCard
) -> None:
    announced.card = replace(announced.card, bound_to="a pipeline")
    announced.settle()

    assert registry.cards() == [announced.card]


def test_a_card_comes_back_after_redis_lost_everything(
    registry: RedisRegistry, announced: AnnouncedCard, redis_server: Valkey
) -> None:
    announced.settle()
    redis_server.kill()
    announced.settle()

    redis_server.restart()
    announced.settle()

    assert registry.cards() == [announced.card]


def test_a_stopped_announcer_takes_its_card_down(
    registry: RedisRegistry, announced: AnnouncedCard
) -> None:
    announced.settle()

    announced.announcer.stop()

    assert registry.cards() == []


def test_a_head_and_its_stage_find_each_other_through_redis(registry: RedisRegistry) -> None:
    with open_pipes(Sockets(bind="tcp://127.0.0.1")) as pipes:
        tail = pipes.stage(8, NUM_LAYERS)
        announcer = Announcer(registry, tail.link.card)
        announcer.start()

        head = pipes.head(8, cards=lambda: registry.cards("tiny"))

        assert head.ready().members[1].card.incarnation == tail.link.card().incarnation
        announcer.stop()
        assert registry.cards("tiny") == []
