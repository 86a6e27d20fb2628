"""The Redis door: stores entries of the intake stream as rows, and acknowledges them after COMMIT.

Delivery is at least once; an entry's job id is made from the entry, so that a second delivery
inserts nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from collections import deque
from collections.abc import Iterable
from typing import Any
from uuid import UUID, uuid5

import structlog
from redis import Redis
from redis.exceptions import ResponseError

from services.relay.loop import Loop, LoopContext
from services.relay.rejects import record_reject
from services.relay.submission import Submission, store_submissions
from shardline.base.clock import monotonic_s
from shardline.contract.keys import INTAKE, INTAKE_GROUP
from shardline_server.failpoints import Point, failpoint

log = structlog.get_logger(__name__)

ENTRY_IDS = UUID("6f0f0c1e-53a5-4f43-9c0b-7a8f0f2d4b11")
"""Namespace of the job ids of entries without one."""

FIELD = b"request"
CONSUMER_IDLE_S = 600.0

MAX_BYTES = 8 << 20
"""Size of a batch, which its last entry may exceed."""

# Redis itself can bound a read by the number of entries only.
READ_NEW = """
local taken, num_bytes = {}, 0
while #taken < tonumber(ARGV[3]) and num_bytes < tonumber(ARGV[4]) do
    local reply = redis.call(
        'XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', 1, 'STREAMS', KEYS[1], '>')
    if not reply then break end
    local entry = reply[1][2][1]
    for _, value in ipairs(entry[2]) do num_bytes = num_bytes + #value end
    table.insert(taken, entry)
end
return taken
"""

Entry = tuple[str, str | None]
"""Its id in the stream and its document; None when the field is missing."""


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
        self._next_rescue_s = 0.0
        self._read_new = redis.register_script(READ_NEW)
        self._rescued: deque[bytes] = deque()
        """Ids of entries taken over from dead relays and not read yet."""

    def turn(self) -> float:
        """Store one batch, bounded in entries and bytes: those of dead relays first, then new ones,
        for which it waits up to `poll_s`."""
        try:
            entries = self._abandoned() or self._new()
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            self._create_group()
            return 0.0
        if entries:
            self._take(entries)
        return 0.0

    def _create_group(self) -> None:
        """Create the group at the stream's beginning, so that entries from before its loss are
        read."""
        try:
            self._redis.xgroup_create(INTAKE, INTAKE_GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def _new(self) -> list[Entry]:
        block_ms = max(1, int(self._times.poll_s * 1000))
        reply = self._redis.xreadgroup(
            INTAKE_GROUP, self._consumer, {INTAKE: ">"}, count=1, block=block_ms
        )
        entries = [entry for _, entries in _streams(reply) for entry in entries]
        if entries:
            left = self._batch - len(entries), MAX_BYTES - sum(map(_num_bytes, entries))
            more: Any = self._read_new(keys=[INTAKE], args=[INTAKE_GROUP, self._consumer, *left])
            entries += [
                (entry_id, dict(zip(flat[::2], flat[1::2], strict=True))) for entry_id, flat in more
            ]
        return _decoded(entries)

    def _abandoned(self) -> list[Entry]:
        """Entries that another relay took and did not acknowledge within a lease."""
        if not self._rescued:
            self._rescue()
        entries: list[Any] = []
        num_bytes = 0
        while self._rescued and num_bytes < MAX_BYTES:
            entry_id = self._rescued.popleft()
            found: Any = self._redis.xrange(INTAKE, entry_id, entry_id)
            if not found:
                # Deleted meanwhile, so another relay has handled it.
                self._redis.xack(INTAKE, INTAKE_GROUP, entry_id)
            entries += found
            num_bytes += sum(map(_num_bytes, found))
        return _decoded(entries)

    def _rescue(self) -> None:
        now_s = monotonic_s()
        if now_s < self._next_rescue_s:
            return
        idle_ms = int(self._times.lease_s * 1000)
        claimed: Any = self._redis.xautoclaim(
            INTAKE,
            INTAKE_GROUP,
            self._consumer,
            min_idle_time=idle_ms,
            count=self._batch,
            justid=True,
        )
        self._rescued.extend(claimed)
        if len(claimed) < self._batch:
            self._next_rescue_s = now_s + self._times.lease_s / 2
            self._forget_dead_consumers()

    def _forget_dead_consumers(self) -> None:
        for consumer in self._redis.xinfo_consumers(INTAKE, INTAKE_GROUP):
            if consumer["pending"] == 0 and consumer["idle"] > CONSUMER_IDLE_S * 1000:
                self._redis.xgroup_delconsumer(INTAKE, INTAKE_GROUP, consumer["name"])

    def _take(self, entries: list[Entry]) -> None:
        failpoint(Point.INTAKE_TAKEN)
        began_s = monotonic_s()
        results = store_submissions(self._database, [_submission(entry) for entry in entries])
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
        ids = [entry_id for entry_id, _ in entries]
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.xack(INTAKE, INTAKE_GROUP, *ids)
            pipeline.xdel(INTAKE, *ids)
            pipeline.execute()


def _streams(reply: Any) -> Iterable[tuple[bytes, list[Any]]]:
    """RESP2 answers with pairs, RESP3 with a map that wraps each value in one more list."""
    if isinstance(reply, dict):
        return ((name, entries[0] if entries else []) for name, entries in reply.items())
    return reply or ()


def _num_bytes(entry: Any) -> int:
    _, fields = entry
    return sum(len(name) + len(value) for name, value in fields.items())


def _decoded(entries: Iterable[Any]) -> list[Entry]:
    """Ids and documents. An entry that was deleted meanwhile has no fields."""
    decoded = []
    for entry_id, fields in entries:
        document = dict(fields or {}).get(FIELD)
        decoded.append(
            (entry_id.decode(), None if document is None else document.decode("utf-8", "replace"))
        )
    return decoded


def _submission(entry: Entry) -> Submission:
    entry_id, text = entry
    digest = hashlib.sha256((text or "").encode()).hexdigest()
    return Submission(id=uuid5(ENTRY_IDS, f"{entry_id}:{digest}"), document=_document(text))


def _document(text: str | None) -> object:
    """The parsed JSON. Anything else stays text, which is then refused as an invalid request."""
    try:
        return json.loads(text or "null")
    except (ValueError, RecursionError):
        return text
