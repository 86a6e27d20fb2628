"""What the clients for threads and for asyncio share: settings and a pool. Asks nothing."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from shardline.base.config import Settings

AnyEngine = TypeVar("AnyEngine", Engine, AsyncEngine)


class BaseClient(ABC, Generic[AnyEngine]):
    """Addresses that are not given come from the environment. A given pool stays its owner's."""

    def __init__(
        self,
        *,
        database_url: str | None = None,
        redis_url: str | None = None,
        tenant: str = "default",
        database: AnyEngine | None = None,
    ) -> None:
        urls: dict[str, Any] = {"database_url": database_url, "redis_url": redis_url}
        self._settings = Settings(**{name: url for name, url in urls.items() if url is not None})
        self.tenant = tenant
        self._owns_database = database is None
        self._pid = os.getpid()
        self._open(self._settings.database_url.get_secret_value(), database)

    @abstractmethod
    def _open(self, url: str, database: AnyEngine | None) -> None:
        """Makes what it asks with, without I/O; its own pool where none is given."""
