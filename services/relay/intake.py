"""The Redis door: stores entries of the intake streams as rows, and acknowledges them after COMMIT.

Delivery is at least once; an entry's job id is made from the entry, so that a second delivery
inserts nothing. Each tenant with a door has its own stream, which determines its entries' tenant.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from collections.abc import Collection, Iterable
from typing import Any

import structlog
from redis import Redis
from redis.exceptions import ResponseError

from services.relay.intake_stream import Entry, IntakeStream
from services.relay.loop import Loop, LoopContext
from services.relay.rejects import record_reject
from services.relay.submission import Submission, store_submissions
from shardline.base.clock import monotonic_s
from shardline.contract.ids import derived_id, former_id
from shardline.contract.keys import INTAKE_GROUP
from shardline.contract.tenants.tenant_door import TenantDoor
from shardline.store.tenants import tenant_doors
from shardline_server.failpoints import Point, failpoint

log = structlog.get_logger(__name__)

MAX_BYTES = 8 << 20
"""Size of a batch, which its last entry may exceed."""

NO_STREAM = ("NOGROUP", "WRONGTYPE")
"""Errors of Redis for a key that is no stream with our group."""


class Intake(Loop):
    """`redis` may block longer than `poll_s` and answers in bytes."""

    def __init__(self, context: LoopContext, *, redis: Redis, batch: int) -> None:
        super().__init__("intake", context.metrics.errors)
        self._database = context.database
        self._redis = redis
        self._times = context.times
        self._batch = batch
        self._metrics = context.metrics
        self._spans = context.spans
        self._consumer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._common = self._stream()
        self._tenants: dict[TenantDoor, IntakeStream] = {}
        self._next_look_s = 0.0

    @property
    def doors(self) -> Collection[TenantDoor]:
        """Returns those of tenants, as last read from Postgres; callable from any thread."""
        return tuple(self._tenants)

    def turn(self) -> float:
        """Store one batch of each stream, bounded in entries and bytes together: those of dead
        relays, and new ones, for which it waits up to `poll_s` if there are no others. Where
        rows cannot be stored, the stream's entries come back after a lease, and no other waits."""
        try:
            batches = self._abandoned()
            batches += self._new(wait_s=0.0 if batches else self._times.poll_s)
        except ResponseError as error:
            if not str(error).startswith(NO_STREAM):
                raise
            self._create_groups()
            return 0.0
        failures = []
        for stream, entries in batches:
            try:
                self._take(stream, entries)
            except Exception as error:  # noqa: BLE001 (raised below)
                if tenant_doors.is_locked_out(error):
                    stream.rest()
                failures.append(error)
        self._follow_doors()
        if failures:
            raise failures[0]
        return 0.0

    def _stream(self, door: TenantDoor | None = None) -> IntakeStream:
        lease_s = self._times.lease_s
        return IntakeStream(self._redis, self._consumer, lease_s=lease_s, door=door)

    def _streams(self) -> list[IntakeStream]:
        return [self._common, *(one for one in self._tenants.values() if not one.rests)]

    def _follow_doors(self) -> None:
        """Look which tenants have a door now. Theirs are read without delay, and no longer once
        closed: what waits there stays until the door is open again."""
        now_s = monotonic_s()
        if now_s < self._next_look_s:
            return
        with self._database.begin() as connection:
            doors = tenant_doors.all_doors(connection)
        known = self._tenants
        self._tenants = {door: known.get(door) or self._stream(door) for door in doors}
        self._next_look_s = now_s + self._times.poll_s

    def _create_groups(self) -> None:
        """Creates the group of each stream. A tenant's that cannot have one stops no other."""
        self._common.create_group()
        for door, stream in list(self._tenants.items()):
            try:
                stream.create_group()
            except ResponseError as error:
                log.warning("a tenant's stream cannot be read", key=stream.key, error=str(error))
                del self._tenants[door]

    def _new(self, *, wait_s: float) -> list[tuple[IntakeStream, list[Entry]]]:
        """Streams with entries share a batch."""
        block_ms = max(1, int(wait_s * 1000))  # 0 would wait for ever
        streams = {stream.key.encode(): stream for stream in self._streams()}
        reply = self._redis.xreadgroup(
            INTAKE_GROUP, self._consumer, dict.fromkeys(streams, ">"), count=1, block=block_ms
        )
        found = [(streams[key], entries) for key, entries in _by_key(reply) if entries]
        room = self._room(len(found))
        return [(stream, stream.more(entries, **room)) for stream, entries in found]

    def _abandoned(self) -> list[tuple[IntakeStream, list[Entry]]]:
        streams = self._streams()
        room = self._room(len(streams))
        found = ((stream, stream.abandoned(**room)) for stream in streams)
        return [(stream, entries) for stream, entries in found if entries]

    def _room(self, num_streams: int) -> dict[str, int]:
        parts = max(1, num_streams)
        return {"num": max(1, self._batch // parts), "num_bytes": MAX_BYTES // parts}

    def _take(self, stream: IntakeStream, entries: list[Entry]) -> None:
        failpoint(Point.INTAKE_TAKEN)
        began_s = monotonic_s()
        submissions = [_submission(entry, stream.door) for entry in entries]
        results = store_submissions(self._database, submissions)
        failpoint(Point.INTAKE_INSERTED, door="stream")
        for (entry_id, document), result in zip(entries, results, strict=True):
            if result.status == "rejected":
                record_reject(
                    self._redis, entry=entry_id, request=document or "", reason=result.reason
                )
            self._metrics.intake.labels(outcome=result.metric_label).inc()
        self._spans.accepted(
            [result.request for result in results if result.request is not None], began_s
        )
        stream.acknowledge([entry_id for entry_id, _ in entries])


def _by_key(reply: Any) -> Iterable[tuple[bytes, list[Any]]]:
    """RESP2 answers with pairs, RESP3 with a map that wraps each value in one more list."""
    if isinstance(reply, dict):
        return ((name, entries[0] if entries else []) for name, entries in reply.items())
    return reply or ()


def _submission(entry: Entry, door: TenantDoor | None) -> Submission:
    entry_id, text = entry
    digest = hashlib.sha256((text or "").encode()).hexdigest()
    place = entry_id if door is None else f"{door.requests} {entry_id}"
    name = f"{place}:{digest}"
    return Submission(
        id=derived_id(name),
        former_id=former_id(name) if door is None else None,
        document=_document(text),
        tenant=None if door is None else door.tenant,
    )


def _document(text: str | None) -> object:
    """The parsed JSON. Anything else stays text, which is then refused as an invalid request."""
    try:
        return json.loads(text or "null")
    except (ValueError, RecursionError):
        return text
