"""A cache of API keys: read from Postgres in batches, kept for seconds. Knows no request.

A revoked key is refused once its entry is older than `fresh_s`. While Postgres is unreachable, a
key that was read within TRUSTED_S is still accepted; any other one gets Unavailable.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from shardline.base.aio import cancel_and_wait
from shardline.base.errors import Overload, Unavailable
from shardline.client.database import outage_of, reachable
from shardline.store import api_keys
from shardline.store.api_keys import KeyRecord

log = structlog.get_logger(__name__)

MAX_REMEMBERED = 4_096
"""Known keys, and apart from them unknown ids: guesses evict no key."""

MAX_WAITING = 1_024
"""Ids that may wait for a look-up."""

LOOKUP_S = 2.0
"""How long a request waits for a Postgres that does not answer."""

AGAIN_S = 1.0
"""How long further look-ups fail at once after a failed one."""

TRUSTED_S = 300.0
USES_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What Postgres returned for a key id, and when."""

    known: KeyRecord | None
    read_s: float

    def is_over(self) -> bool:
        """Whether the key has expired."""
        lifetime_s = math.inf if self.known is None else self.known.expires_in_s
        return lifetime_s is not None and time.monotonic() - self.read_s >= lifetime_s


class Keyring:
    """One query at a time reads all ids requested meanwhile, so that guessing keys takes one
    connection."""

    def __init__(self, database: AsyncEngine, *, fresh_s: float) -> None:
        self._database = database
        self._fresh_s = fresh_s
        self._keys: OrderedDict[str, Entry] = OrderedDict()
        self._unknown: OrderedDict[str, Entry] = OrderedDict()
        self._wanted: set[str] = set()
        self._failed_s = -math.inf
        self._lock = asyncio.Lock()
        self._query: asyncio.Task[None] | None = None
        self._used: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to record which keys are used."""
        self._task = asyncio.create_task(self._note_uses(), name="key uses")

    async def close(self) -> None:
        """Stop, and record the last uses."""
        for task in (self._task, self._query):
            if task is not None:
                await cancel_and_wait(task)
        await self._write_uses()

    async def get(self, key_id: str) -> Entry:
        """The entry of a key id. Raises Unavailable, and Overload when too many ids wait for a
        look-up."""
        asked_s = time.monotonic()
        entry = self._remembered(key_id)
        if entry is not None and self._is_fresh(entry, asked_s):
            return entry
        if len(self._wanted) >= MAX_WAITING and key_id not in self._wanted:
            raise Overload(
                f"{MAX_WAITING} API keys are being looked up, which is the limit", AGAIN_S
            )
        self._wanted.add(key_id)
        try:
            return await self._read(key_id, asked_s)
        except Unavailable:
            if entry is None or entry.known is None or entry.read_s < asked_s - TRUSTED_S:
                raise
            return entry

    def note(self, key_id: str) -> None:
        """Record that a key was used; it is written later, outside the request."""
        if len(self._used) < MAX_REMEMBERED:
            self._used.add(key_id)

    def _remembered(self, key_id: str) -> Entry | None:
        return self._keys.get(key_id) or self._unknown.get(key_id)

    def _is_fresh(self, entry: Entry, asked_s: float) -> bool:
        return entry.read_s >= asked_s - self._fresh_s

    async def _read(self, key_id: str, asked_s: float) -> Entry:
        async with self._lock:
            entry = self._remembered(key_id)
            # Another request may have read this id while we waited for the lock.
            if entry is None or not self._is_fresh(entry, asked_s):
                self._wanted.add(key_id)
                await self._look_up()
                entry = self._remembered(key_id)
        assert entry is not None, "every wanted id was looked up"
        return entry

    async def _look_up(self) -> None:
        """Read all wanted ids. A query without an answer is not cancelled: that would wait for
        Postgres too."""
        ids = self._wanted
        self._wanted = set()
        if time.monotonic() - self._failed_s < AGAIN_S or (
            self._query is not None and not self._query.done()
        ):
            raise Unavailable("API keys cannot be checked: Postgres was unreachable a moment ago")
        self._query = asyncio.create_task(self._ask(ids), name="key look-up")
        # It may fail when nobody waits any more, which asyncio would log as a defect
        self._query.add_done_callback(lambda query: query.cancelled() or query.exception())
        done, _ = await asyncio.wait({self._query}, timeout=LOOKUP_S)
        silent = f"API keys cannot be checked: Postgres did not answer within {LOOKUP_S:g} s"
        problem = self._query.exception() if done else Unavailable(silent)
        if problem is not None:
            self._failed_s = time.monotonic()
            raise problem

    async def _ask(self, ids: Collection[str]) -> None:
        began_s = time.monotonic()
        with reachable():
            async with self._database.connect() as connection:
                found = await connection.run_sync(api_keys.find, ids)
        for key_id in ids:
            self._remember(key_id, Entry(known=found.get(key_id), read_s=began_s))

    def _remember(self, key_id: str, entry: Entry) -> None:
        mine, other = (
            (self._unknown, self._keys) if entry.known is None else (self._keys, self._unknown)
        )
        other.pop(key_id, None)
        mine[key_id] = entry
        mine.move_to_end(key_id)
        if len(mine) > MAX_REMEMBERED:
            mine.popitem(last=False)

    async def _note_uses(self) -> None:
        while True:
            await asyncio.sleep(USES_EVERY_S)
            await self._write_uses()

    async def _write_uses(self) -> None:
        """Uses that cannot be written are written with the next ones."""
        if not self._used:
            return
        ids = self._used
        self._used = set()
        try:
            with reachable():
                async with self._database.begin() as connection:
                    await connection.run_sync(api_keys.note_use, ids)
        except (Unavailable, DBAPIError) as error:
            self._used |= ids
            log.warning("last use of API keys not recorded", error=outage_of(error))
