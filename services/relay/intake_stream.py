"""One stream of requests as one relay reads it: new entries, and those that a dead relay took.
Knows no row."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable
from typing import Any

import structlog
from redis import Redis
from redis.exceptions import ResponseError

from shardline.base.clock import monotonic_s
from shardline.contract.keys import INTAKE, INTAKE_GROUP
from shardline.contract.tenants.tenant_door import TenantDoor

log = structlog.get_logger(__name__)

FIELD = b"request"
CONSUMER_IDLE_S = 600.0

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

# Another relay may have made the stream meanwhile.
MOVE_ASIDE = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'stream' or kind == 'none' then return false end
redis.call('RENAME', KEYS[1], KEYS[2])
return kind
"""

Entry = tuple[str, str | None]
"""Its id in the stream and its document; None when the field is missing."""


class IntakeStream:
    """`door`: that of the stream's tenant; None: the stream for all clients that may use Redis."""

    def __init__(
        self, redis: Redis, consumer: str, *, lease_s: float, door: TenantDoor | None = None
    ) -> None:
        self.door = door
        self.key = INTAKE if door is None else door.requests
        self._redis = redis
        self._consumer = consumer
        self._lease_s = lease_s
        self._rests_until_s = 0.0
        self._next_rescue_s = 0.0
        self._read_new = redis.register_script(READ_NEW)
        self._rescued: deque[bytes] = deque()
        """Ids of entries taken over from dead relays and not read yet."""

    @property
    def rests(self) -> bool:
        """Whether its rows could not be stored of late."""
        return monotonic_s() < self._rests_until_s

    def rest(self) -> None:
        """Leave it alone for a while, so that its tenant's locks hold up no other."""
        self._rests_until_s = monotonic_s() + self._lease_s / 2

    def create_group(self) -> None:
        """Create the group at the stream's beginning, so that entries from before its loss are
        read. A key that is no stream is moved aside."""
        aside = f"{self.key}:wrong:{secrets.token_hex(8)}"
        kind: Any = self._redis.eval(MOVE_ASIDE, 2, self.key, aside)
        if kind is not None:
            kind = kind.decode()
            log.warning("a key of the wrong type is moved aside", key=self.key, type=kind, to=aside)
        try:
            self._redis.xgroup_create(self.key, INTAKE_GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def more(self, entries: list[Any], *, num: int, num_bytes: int) -> list[Entry]:
        """Returns these entries and further ones within `num`; the last may exceed `num_bytes`."""
        left = num - len(entries), num_bytes - sum(map(_num_bytes, entries))
        args: list[Any] = [INTAKE_GROUP, self._consumer, *left]
        found: Any = self._read_new(keys=[self.key], args=args)
        further = (
            (entry_id, dict(zip(flat[::2], flat[1::2], strict=True))) for entry_id, flat in found
        )
        return _decoded([*entries, *further])

    def abandoned(self, *, num: int, num_bytes: int) -> list[Entry]:
        """Entries that another relay took and did not acknowledge within a lease."""
        if not self._rescued:
            self._rescue(num)
        entries: list[Any] = []
        while self._rescued and num_bytes > 0:
            entry_id = self._rescued.popleft()
            found: Any = self._redis.xrange(self.key, entry_id, entry_id)
            if not found:
                # Deleted meanwhile, so another relay has handled it.
                self._redis.xack(self.key, INTAKE_GROUP, entry_id)
            entries += found
            num_bytes -= sum(map(_num_bytes, found))
        return _decoded(entries)

    def acknowledge(self, ids: list[str]) -> None:
        """Removes entries after the COMMIT of their rows."""
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.xack(self.key, INTAKE_GROUP, *ids)
            pipeline.xdel(self.key, *ids)
            pipeline.execute()

    def _rescue(self, num: int) -> None:
        now_s = monotonic_s()
        if now_s < self._next_rescue_s:
            return
        claimed: Any = self._redis.xautoclaim(
            self.key,
            INTAKE_GROUP,
            self._consumer,
            min_idle_time=int(self._lease_s * 1000),
            count=num,
            justid=True,
        )
        self._rescued.extend(claimed)
        if len(claimed) < num:
            self._next_rescue_s = now_s + self._lease_s / 2
            self._forget_dead_consumers()

    def _forget_dead_consumers(self) -> None:
        for consumer in self._redis.xinfo_consumers(self.key, INTAKE_GROUP):
            if consumer["pending"] == 0 and consumer["idle"] > CONSUMER_IDLE_S * 1000:
                self._redis.xgroup_delconsumer(self.key, INTAKE_GROUP, consumer["name"])


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
