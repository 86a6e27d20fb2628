"""kombu's Redis transport, with a send that happens once however often it is repeated. Knows no
task.

Who sends names what it is for (`sending`); the message's id is noted in a hash of that name in the
same moment in which Redis takes the message, so a relay that repeats the work of one that died
sends what that one did not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from kombu.transport import redis
from kombu.utils.json import dumps

from shardline.base.redis_url import SENTINEL
from shardline.contract.keys import TASK_SENDS_TTL_S

NOTED_IN: ContextVar[str | None] = ContextVar("NOTED_IN", default=None)
"""The hash in which this thread's sends are noted; None: they are not."""

PUT_ONCE = """
if redis.call('HSETNX', KEYS[1], ARGV[1], 1) == 1 then
    redis.call('EXPIRE', KEYS[1], ARGV[2])
    redis.call('LPUSH', KEYS[2], ARGV[3])
end
"""


@contextmanager
def sending(key: str) -> Iterator[None]:
    """Makes each message with an id leave once for this hash, whichever process sends it."""
    token = NOTED_IN.set(key)
    try:
        yield
    finally:
        NOTED_IN.reset(token)


class OnceChannel(redis.Channel):
    """Puts a task's message into its queue unless it is noted."""

    def _put(self, queue: str, message: dict[str, Any], **options: Any) -> None:
        key = NOTED_IN.get()
        message_id = (message.get("headers") or {}).get("id")
        if key is None or message_id is None:
            super()._put(queue, message, **options)
            return
        place = self._q_for_pri(queue, self._get_message_priority(message, reverse=False))
        with self.conn_or_acquire() as client:
            client.eval(PUT_ONCE, 2, key, place, message_id, TASK_SENDS_TTL_S, dumps(message))


class OnceTransport(redis.Transport):
    """Serves as `broker_transport`."""

    Channel = OnceChannel


class OnceSentinelChannel(OnceChannel, redis.SentinelChannel):
    """Asks Sentinels for the server."""


class OnceSentinelTransport(redis.SentinelTransport):
    """Serves as `broker_transport` for Sentinels."""

    Channel = OnceSentinelChannel


def once_transport(broker_url: str) -> str:
    """Returns the value of `broker_transport` for this URL."""
    is_sentinel = broker_url.startswith(SENTINEL)
    kind = OnceSentinelTransport if is_sentinel else OnceTransport
    return f"{kind.__module__}:{kind.__name__}"
