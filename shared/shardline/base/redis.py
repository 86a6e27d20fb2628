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
from redis.asyncio.sentinel import MasterNotFoundError as AsyncMasterNotFoundError
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from shardline.base.redis_url import RedisAddress


class PrimarySentinel(redis.sentinel.Sentinel):
    """Finds the primary. Its error is short: redis-py's shows every client with its options."""

    def discover_master(self, service_name: Any) -> Any:
        """Returns host and port. Raises MasterNotFoundError."""
        untyped: Any = super()
        try:
            return untyped.discover_master(service_name)
        except MasterNotFoundError:
            raise _not_found(service_name) from None


class AsyncPrimarySentinel(redis.asyncio.sentinel.Sentinel):
    """PrimarySentinel for asyncio."""

    async def discover_master(self, service_name: str) -> Any:
        """Returns host and port. Raises MasterNotFoundError."""
        untyped: Any = super()
        try:
            return await untyped.discover_master(service_name)
        except AsyncMasterNotFoundError:
            raise _not_found(service_name) from None


# Without types in redis-py.
SENTINEL: Any = PrimarySentinel
ASYNC_SENTINEL: Any = AsyncPrimarySentinel


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


def _not_found(name: str) -> MasterNotFoundError:
    return MasterNotFoundError(f"no Sentinel that answers knows a primary named {name!r}")


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
