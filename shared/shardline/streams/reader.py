"""Streams followed for tasks over one connection, or by a thread. Knows no order, no Postgres."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

import redis
import structlog
from redis.exceptions import RedisError, ResponseError

from shardline.base.aio import cancel_and_wait, is_cancelled
from shardline.base.errors import ProtocolError
from shardline.base.redis import async_redis_client, redis_client
from shardline.contract.keys import job_stream
from shardline.contract.wire import DELTA_FIELD, Delta, decode_delta

log = structlog.get_logger(__name__)

BLOCK_MS = 50
"""A stream that is watched from now on waits at most so long for its first read."""

PAUSE_S = 0.004
"""Between reads, so that many streams' deltas travel together."""

RETRY_S = 0.5
THREAD_RETRY_S = 0.2
TIMEOUT_S = 5.0
MAX_KEYS_PER_READ = 256
"""More streams are read in turns that do not block: one command and its answer stay small."""

TURNS_PAUSE_S = 0.02
"""Between such turns: 2,000 streams without news cost a few milliseconds each time."""

MAX_ENTRIES_PER_READ = 64
"""Of each stream: after a reconnect all of them are read from their beginning."""

MAX_UNREAD = 4_096
"""Of one slow reader; older ones are dropped, and it fills the gap from Postgres."""

NO_STREAM = "WRONGTYPE"
"""How Redis begins its answer about a key that holds something else."""


class DeltaBuffer:
    """What waits for one reader: deltas, and a bell that rings for anything that it should look
    at."""

    def __init__(self) -> None:
        self.bell = asyncio.Event()
        self.ended = False
        """Set once it is known that the job has ended."""
        self._deltas: deque[Delta] = deque(maxlen=MAX_UNREAD)

    def put(self, delta: Delta) -> None:
        """Adds a delta, from the reader's task."""
        self._deltas.append(delta)
        self.bell.set()

    def end(self) -> None:
        """The job has ended: Postgres has all of it."""
        self.ended = True
        self.bell.set()

    async def wait(self, timeout_s: float) -> list[Delta]:
        """The deltas that came, at the latest after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.bell.wait()
        self.bell.clear()
        deltas = list(self._deltas)
        self._deltas.clear()
        return deltas


class DeltaReader:
    """One task and one connection for all watched streams. While Redis is unreachable, `is_away` is
    true."""

    def __init__(self, redis_url: str) -> None:
        self._redis = async_redis_client(redis_url, timeout_s=TIMEOUT_S)
        self.is_away = False
        self._watched: dict[bytes, list[DeltaBuffer]] = {}
        self._last_ids: dict[bytes, bytes] = {}
        self._broken: set[bytes] = set()
        """Watched keys that are no streams."""
        self._any_watched = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """End the task and the connection."""
        if self._task is not None:
            await cancel_and_wait(self._task)
        await self._redis.aclose()

    @contextmanager
    def watch(self, job_id: UUID, buffer: DeltaBuffer) -> Iterator[None]:
        """While inside, the job's deltas go to `buffer`: all that its stream holds, then new
        ones."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="deltas")
        key = job_stream(job_id).encode()
        self._watched.setdefault(key, []).append(buffer)
        # A second watcher of the same stream has it read again from its beginning; the first
        # ignores repeats.
        self._last_ids[key] = b"0"
        self._any_watched.set()
        try:
            yield
        finally:
            self._watched[key].remove(buffer)
            if not self._watched[key]:
                del self._watched[key], self._last_ids[key]
                self._broken.discard(key)
            if not self._watched:
                self._any_watched.clear()

    async def _run(self) -> None:
        while not is_cancelled():
            await self._any_watched.wait()
            try:
                await self._read()
            except (RedisError, OSError, TimeoutError) as error:
                self._note_away(error)
                await asyncio.sleep(RETRY_S)
            else:
                self.is_away = False
                await asyncio.sleep(
                    PAUSE_S if len(self._last_ids) <= MAX_KEYS_PER_READ else TURNS_PAUSE_S
                )

    async def _read(self) -> None:
        keys = list(self._last_ids)
        block_ms = BLOCK_MS if len(keys) <= MAX_KEYS_PER_READ else None
        for start in range(0, len(keys), MAX_KEYS_PER_READ):
            some = keys[start : start + MAX_KEYS_PER_READ]
            if asked := {key: self._last_ids[key] for key in some if key in self._last_ids}:
                await self._read_some(asked, block_ms)

    async def _read_some(self, asked: dict[bytes, bytes], block_ms: int | None) -> None:
        streams: Any = {key: last_id for key, last_id in asked.items() if key not in self._broken}
        if not streams:
            return
        try:
            reply: Any = await self._redis.xread(
                streams, count=MAX_ENTRIES_PER_READ, block=block_ms
            )
        except ResponseError as error:
            if not str(error).startswith(NO_STREAM):
                raise
            await self._find_broken(streams)
            return
        for key, entries in _entries(reply):
            if self._last_ids.get(key) == asked[key]:
                self._last_ids[key] = entries[-1][0]
            for delta in deltas_of(entries):
                for buffer in self._watched.get(key, ()):
                    buffer.put(delta)

    async def _find_broken(self, keys: Iterable[bytes]) -> None:
        """One key that is no stream refuses the read of all: its readers get their job from
        Postgres, at its end."""
        for key in keys:
            if await self._redis.type(key) not in (b"stream", b"none"):
                log.warning(
                    "a key of a job's stream holds something else", key=key.decode(errors="replace")
                )
                self._broken.add(key)

    def _note_away(self, error: Exception) -> None:
        """After an outage the server may be another one, with other entry ids: read every stream
        from its beginning."""
        if not self.is_away:
            log.warning("Redis unreachable: streams go on from Postgres", error=str(error)[:200])
        self.is_away = True
        self._last_ids = dict.fromkeys(self._last_ids, b"0")
        for buffers in self._watched.values():
            for buffer in buffers:
                buffer.bell.set()


def _entries(reply: Any) -> Iterator[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]:
    """XREAD's reply in either protocol version: RESP3 has one more list around the entries."""
    if isinstance(reply, dict):
        for key, lists in reply.items():
            yield key, [entry for entries in lists for entry in entries]
    else:
        yield from reply or ()


def deltas_of(entries: list[tuple[bytes, dict[bytes, bytes]]]) -> Iterator[Delta]:
    """Entries that are no delta are passed over: what they held is in Postgres."""
    for _, fields in entries:
        try:
            yield decode_delta(fields.get(DELTA_FIELD.encode(), b""))
        except ProtocolError as error:
            log.warning("a stream holds an entry that is no delta", error=str(error)[:200])


class SyncDeltaReader:
    """A job's stream from its beginning. While Redis is unreachable it has nothing, and `is_away`
    is true."""

    def __init__(self, client: redis.Redis, job_id: UUID) -> None:
        self.is_away = False
        self._redis = client
        self._key = job_stream(job_id)
        self._last_id: bytes | str = "0"

    @staticmethod
    def connect(redis_url: str) -> redis.Redis:
        """Returns a connection with reads that may block for up to TIMEOUT_S."""
        return redis_client(redis_url, timeout_s=TIMEOUT_S, protocol=2)

    def read(self, block_s: float) -> list[Delta]:
        """The deltas that came, at the latest after `block_s`."""
        if self.is_away:
            time.sleep(min(THREAD_RETRY_S, block_s))
        block_ms = max(1, int(min(block_s, TIMEOUT_S / 2) * 1_000))
        try:
            asked: Any = {self._key: self._last_id}
            reply: Any = self._redis.xread(asked, count=MAX_ENTRIES_PER_READ, block=block_ms)
        except (RedisError, OSError):
            self.is_away = True
            self._last_id = "0"
            return []
        self.is_away = False
        entries = reply[0][1] if reply else []
        if entries:
            self._last_id = entries[-1][0]
        return list(deltas_of(entries))
