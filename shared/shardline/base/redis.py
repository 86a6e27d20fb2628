"""Clients of Redis: one place for timeouts and retries. Knows no key and no form of URL.

No call waits for long, and none is repeated unless its caller asks for it: their loops do the
retrying.
"""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from shardline.base.redis_url import RedisAddress


def redis_client(
    url: str, *, timeout_s: float, num_retries: int = 0, **options: Any
) -> redis.Redis:
    """Returns a client for threads. Connects lazily; `timeout_s` bounds connecting and each answer.
    `options`: those of redis.Redis."""
    retry = Retry(NoBackoff(), num_retries)
    where = RedisAddress.parse(url).client_options()
    return redis.Redis(
        **where, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=retry, **options
    )


def async_redis_client(url: str, *, timeout_s: float) -> redis.asyncio.Redis:
    """Returns a client for asyncio, without retries. Connects lazily; `timeout_s` bounds connecting
    and each answer."""
    retry = AsyncRetry(NoBackoff(), 0)
    where = RedisAddress.parse(url).client_options()
    return redis.asyncio.Redis(
        **where, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=retry
    )
