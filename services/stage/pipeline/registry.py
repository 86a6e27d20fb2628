"""How stages find each other: cards in Redis. Owns the keys' life; proves nothing: a missing card
never means death."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import redis
import structlog

from shardline.base.errors import ProtocolError, Unavailable
from shardline.base.redis import redis_client
from shardline.contract import keys
from shardline.contract.wire import StageCard, decode_card, encode_card

RENEW_S = keys.REGISTRY_TTL_S / keys.REGISTRY_RENEWALS
TIMEOUT_S = 1.0
"""Of one Redis call: a paused Redis must not hold up a pipeline for long."""

log = structlog.get_logger(__name__)


class Registry(Protocol):
    """The cards of live stages. Used by any thread."""

    def announce(self, card: StageCard) -> None:
        """Puts the card up for REGISTRY_TTL_S. Raises Unavailable."""

    def withdraw(self, incarnation: str) -> None:
        """Takes the card down. Raises Unavailable."""

    def cards(self, model: str | None = None) -> list[StageCard]:
        """The cards that are up (of one model). Raises Unavailable."""

    def close(self) -> None:
        """Closes the connections."""


class RedisRegistry:
    """The Registry in Redis: a key for each card, and the set of all."""

    def __init__(self, redis_url: str) -> None:
        # Once more: a connection that broke while idle is opened again.
        self._redis = redis_client(redis_url, timeout_s=TIMEOUT_S, num_retries=1)

    def announce(self, card: StageCard) -> None:
        """Puts the card up for REGISTRY_TTL_S. Raises Unavailable."""
        with _redis_errors(), self._redis.pipeline(transaction=False) as pipeline:
            pipeline.set(
                keys.stage_entry(card.incarnation), encode_card(card), ex=keys.REGISTRY_TTL_S
            )
            pipeline.sadd(keys.STAGES, card.incarnation)
            pipeline.expire(keys.STAGES, keys.STAGES_TTL_S)
            pipeline.execute()

    def withdraw(self, incarnation: str) -> None:
        """Takes the card down. Raises Unavailable."""
        with _redis_errors(), self._redis.pipeline(transaction=False) as pipeline:
            pipeline.delete(keys.stage_entry(incarnation))
            pipeline.srem(keys.STAGES, incarnation)
            pipeline.execute()

    def cards(self, model: str | None = None) -> list[StageCard]:
        """The cards that are up (of one model), at most MAX_CARDS, by worker name. Raises
        Unavailable."""
        with _redis_errors():
            members: Any = self._redis.srandmember(keys.STAGES, keys.MAX_CARDS)
            names = [_text(name) for name in members]
            values = self._redis.mget([keys.stage_entry(name) for name in names]) if names else []
            gone = [name for name, value in zip(names, values, strict=True) if value is None]
            if gone:
                self._redis.srem(keys.STAGES, *gone)
        cards = [card for card in map(_read_card, values) if card is not None]
        return sorted(
            (card for card in cards if model in (None, card.model)), key=lambda card: card.worker
        )

    def close(self) -> None:
        """Closes the connections."""
        self._redis.close()


class Announcer:
    """A thread that keeps this stage's card up. An unreachable Redis is no error: it is logged once
    and goes on."""

    def __init__(self, registry: Registry, card: Callable[[], StageCard]) -> None:
        self._registry = registry
        self._card = card
        self._stopping = False
        self._due = threading.Event()
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)

    def start(self) -> None:
        """Puts the card up, and again every RENEW_S."""
        self._thread.start()

    def touch(self) -> None:
        """Puts the card up now: it has changed. Any thread."""
        self._due.set()

    def stop(self) -> None:
        """Takes the card down."""
        self._stopping = True
        self._due.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._try(lambda: self._registry.announce(self._card()))
            self._due.wait(RENEW_S)
            self._due.clear()
        self._try(lambda: self._registry.withdraw(self._card().incarnation))

    def _try(self, call: Callable[[], None]) -> None:
        problem = None
        try:
            call()
        except Unavailable as error:
            problem = str(error)
        if (problem is None) != (self._problem is None):
            log.warning("registry", state="away" if problem else "back", problem=problem)
        self._problem = problem


@contextmanager
def _redis_errors() -> Iterator[None]:
    try:
        yield
    except (redis.RedisError, OSError) as error:
        raise Unavailable(f"Redis unreachable: {error}") from error


def _text(name: bytes | str) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def _read_card(value: bytes | str | None) -> StageCard | None:
    """None for a card that expired meanwhile or that is none of ours."""
    if value is None:
        return None
    try:
        return decode_card(value.encode() if isinstance(value, str) else value)
    except ProtocolError as error:
        log.warning("unreadable stage card", problem=str(error))
        return None
