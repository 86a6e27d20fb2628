"""Clients of Redis: one place for timeouts and retries. Knows no key and no form of URL.

No call waits for long, and none is repeated unless its caller asks for it: their loops do the
retrying.
"""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from shardline.base.redis_url import RedisAddress

# Without types in redis-py.
SENTINEL: Any = redis.sentinel.Sentinel
ASYNC_SENTINEL: Any = redis.asyncio.sentinel.Sentinel


class PrimaryPool(redis.sentinel.SentinelConnectionPool):
    """Connections to the server that Sentinels call the primary. Closes those to them too."""

    def disconnect(self, *arguments: Any, **options: Any) -> None:
        """Closes all connections."""
        super().disconnect(*arguments, **options)
        for sentinel in self.sentinel_manager.sentinels:
            sentinel.close()


class AsyncPrimaryPool(redis.asyncio.sentinel.SentinelConnectionPool):
    """PrimaryPool for asyncio."""

    async def disconnect(self, *arguments: Any, **options: Any) -> None:
        """Closes all connections."""
        await super().disconnect(*arguments, **options)
        for sentinel in self.sentinel_manager.sentinels:
            await sentinel.aclose()


def redis_client(
    url: str, *, timeout_s: float, num_retries: int = 0, **options: Any
) -> redis.Redis:
    """Returns a client for threads. Connects lazily; `timeout_s` bounds connecting and each answer.
    `options`: those of redis.Redis."""
    address = RedisAddress.parse(url)
    waits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    options = {
        **address.client_options(),
        **waits,
        "retry": Retry(NoBackoff(), num_retries),
        **options,
    }
    if address.sentinel is None:
        return redis.Redis(**options)
    group = address.sentinel
    own = {**group.login(), **address.tls_options(), **waits, "retry": Retry(NoBackoff(), 0)}
    sentinel: Any = SENTINEL(group.hosts, sentinel_kwargs=own)
    found: redis.Redis = sentinel.master_for(
        group.master_name, connection_pool_class=PrimaryPool, **options
    )
    return found


def async_redis_client(url: str, *, timeout_s: float) -> redis.asyncio.Redis:
    """Returns a client for asyncio, without retries. Connects lazily; `timeout_s` bounds connecting
    and each answer."""
    address = RedisAddress.parse(url)
    waits: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": AsyncRetry(NoBackoff(), 0),
    }
    options = {**address.client_options(), **waits}
    if address.sentinel is None:
        return redis.asyncio.Redis(**options)
    group = address.sentinel
    own = {**group.login(), **address.tls_options(), **waits}
    sentinel: Any = ASYNC_SENTINEL(group.hosts, sentinel_kwargs=own)
    found: redis.asyncio.Redis = sentinel.master_for(
        group.master_name, connection_pool_class=AsyncPrimaryPool, **options
    )
    return found
