"""kombu's Redis transport, with a receive that no kill can lose a message in. Knows no task.

kombu takes a message out of its queue with BRPOP and then writes it to the unacknowledged ones: a
worker that is killed in between has it alone. Here a script does both in one moment, and BLMOVE of
a queue onto itself waits for it.

Where a message belongs is where it was taken from. Its own `delivery_info` and `delivery_tag` are
its sender's words: kombu would put it back into any queue that they name, or over another message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from queue import Empty
from typing import Any
from uuid import uuid4

import structlog
from kombu.transport import TRANSPORT_ALIASES, redis
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads
from redis.exceptions import RedisError, ResponseError

from shardline.base.clock import monotonic_s, wall_clock_s
from shardline.base.redis_url import SENTINEL, TCP, TLS
from shardline.contract.tenants.tenant_door import TenantDoor
from shardline_server.failpoints import Point, failpoint

log = structlog.get_logger(__name__)

WAIT_S = 0.1
"""A message of a priority with its own queue is seen after this long at most."""

OTHER_SEP = ":"
"""In apps that tell priorities apart as Celery's documentation shows, with `sep`: kombu's own
default is another."""

WRONG_TYPE = "WRONGTYPE"
"""In an error of Redis for a key that is no list."""

TAKE = """
for place = 3, #KEYS do
    local message = redis.pcall('RPOP', KEYS[place])
    if type(message) == 'table' then
        -- An error: no list. It would stop this queue and all others.
        local kind = redis.call('TYPE', KEYS[place]).ok
        local moved = KEYS[place] .. ':wrong:' .. ARGV[2]
        redis.call('RENAME', KEYS[place], moved)
        return {KEYS[place], kind, moved}
    end
    if message then
        -- What kombu itself writes next; a message that cannot be read is refused, and needs no
        -- second try. Without an exchange it is put back into the queue itself.
        local is_read, envelope = pcall(cjson.decode, message)
        local properties = is_read and type(envelope) == 'table' and envelope['properties']
        if type(properties) == 'table' and type(properties['delivery_info']) == 'table' then
            local queue = cjson.encode(ARGV[place])
            redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
            redis.call('HSET', KEYS[2], ARGV[2], '[' .. message .. ',"",' .. queue .. ']')
        end
        return {ARGV[place], message}
    end
end
return false
"""


class PlainQoS(redis.QoS):
    """Puts an unacknowledged message back whatever it holds: its consumer refuses it, with the
    reason. kombu would decode its values here, and one that cannot be decoded would end every
    worker at its start."""

    def restore_by_tag(self, tag: str, client: Any = None, leftmost: bool = False) -> None:
        """Moves the message from the unacknowledged ones to its queue, in one transaction."""

        def restore(pipe: Any) -> None:
            noted = pipe.hget(self.unacked_key, tag)
            pipe.multi()
            self._remove_from_indices(tag, pipe)
            if not noted:
                return
            try:
                message, exchange, routing_key = json.loads(noted)
            except (ValueError, RecursionError) as error:
                # Lua has read it when it was taken, and Python cannot: it is nested too deeply.
                problem = type(error).__name__
                log.warning("a message that is no task is dropped", task_id=tag, problem=problem)
                return
            self.channel._do_restore_message(message, exchange, routing_key, pipe, leftmost)  # noqa: SLF001 (as kombu's own does)

        with self.channel.conn_or_acquire(client) as connected:
            connected.transaction(restore, self.unacked_key)


class AtomicChannel(redis.Channel):
    """Takes a message and notes it as unacknowledged in the same moment."""

    QoS = PlainQoS
    _in_poll: Any
    _brpop_sent_at: Any

    def _brpop_start(self, timeout: float | None = None) -> None:  # noqa: ARG002 (kombu's)
        queues = self._queue_cycle.consume(len(self.active_queues))
        if queues:
            self._in_poll = self.client.connection
            self._brpop_sent_at = monotonic_s()
            # The queue of the last message: a wait on an empty one would ignore the full ones.
            queue = self._q_for_pri(queues[-1], self.priority_steps[0])
            command = self._prefixed(["BLMOVE", queue, queue, "RIGHT", "RIGHT", WAIT_S])
            self.client.connection.send_command(*command)

    def _brpop_read(self, **options: Any) -> bool:
        try:
            try:
                self.client.parse_response(self.client.connection, "BLMOVE", **options)
            except self.connection_errors:
                self.client.connection.disconnect()
                raise
            except ResponseError as error:
                # The script moves that key aside.
                if WRONG_TYPE not in str(error):
                    raise
            taken = self._take()
            if taken is None:
                raise Empty
            failpoint(Point.CELERY_TAKEN)
            self._give_on(*taken)
            return True
        finally:
            self._in_poll = None
            self._flush_brpop_reauth()

    def _give_on(self, queue: str, message: str, tag: str) -> None:
        """Gives the message to its consumer. One that ends there, refused, must not come again."""
        self._queue_cycle.rotate(queue)
        is_kept = True
        try:
            self.connection._deliver(_addressed(message, queue, tag), queue)  # noqa: SLF001 (as kombu's own does)
            is_kept = tag in self.qos._delivered  # noqa: SLF001 (unless it was acknowledged)
        except (RedisError, OSError):
            raise
        except Exception:
            is_kept = False
            raise
        finally:
            if not is_kept:
                with self.conn_or_acquire() as client:
                    client.zrem(self.unacked_index_key, tag)
                    client.hdel(self.unacked_key, tag)

    def _take(self) -> tuple[str, str, str] | None:
        """The most urgent message of the first queue with any, in turns: its queue, itself, and its
        tag."""
        active = self._queue_cycle.consume(len(self.active_queues))
        # A queue's urgent messages go before its own others alone: senders name their priorities.
        places = [(queue, key) for queue in active for key in self._keys(queue)]
        queues = [queue for queue, _ in places]
        keys = [key for _, key in places]
        tag = str(uuid4())
        with self.conn_or_acquire() as client:
            noted = (self.unacked_index_key, self.unacked_key)
            arguments = (wall_clock_s(), tag, *queues)
            taken = client.eval(TAKE, len(noted) + len(keys), *noted, *keys, *arguments)
        if not taken:
            return None
        queue, message, *moved = map(bytes_to_str, taken)
        if moved:
            log.warning(
                "a key of the wrong type is moved aside", key=queue, type=message, to=moved[0]
            )
            return None
        return queue, message, tag

    def _size(self, queue: str) -> int:
        """Returns the number of messages, for the declaration of a queue."""
        try:
            return int(super()._size(queue))
        except ResponseError as error:
            if WRONG_TYPE not in str(error):
                raise
            return 0

    def _keys(self, queue: str) -> Iterator[str]:
        """Yields the lists of a queue, the most urgent first. A tenant's user may write into those
        of kombu's own form alone."""
        for step in self.priority_steps:
            yield self._q_for_pri(queue, step)
            if step and TenantDoor.of_queue(queue) is None:
                yield f"{queue}{OTHER_SEP}{step}"

    def _prefixed(self, command: list[Any]) -> list[Any]:
        if not self.global_keyprefix:
            return command
        return self.client._prefix_args(command)  # noqa: SLF001 (as kombu's own does)


def _addressed(message: str, queue: str, tag: str) -> Any:
    """Returns the message with our tag and queue in place of its sender's. A message without these
    properties is not kombu's: its consumer refuses it before it acts on any."""
    envelope = loads(message)
    if not isinstance(envelope, dict):
        return envelope
    properties = envelope.get("properties")
    if (
        isinstance(properties, dict)
        and properties.get("delivery_tag")
        and isinstance(properties.get("delivery_info"), dict)
    ):
        properties["delivery_tag"] = tag
        properties["delivery_info"] = {"exchange": "", "routing_key": queue}
    else:
        envelope.pop("properties", None)
    if TenantDoor.of_queue(queue) is not None:
        # A few bytes may be gigabytes, which kombu would unpack before anybody looks at it: Python
        # knows zlib as an encoding too.
        envelope["content-encoding"] = "utf-8"
        if isinstance(headers := envelope.get("headers"), dict):
            headers.pop("compression", None)
    return envelope


class AtomicTransport(redis.Transport):
    """Stands where kombu's transport stands, under the same schemes of URL."""

    Channel = AtomicChannel


class AtomicSentinelChannel(AtomicChannel, redis.SentinelChannel):
    """Asks Sentinels for the server."""


class AtomicSentinelTransport(redis.SentinelTransport):
    """Stands where kombu's transport for Sentinels stands."""

    Channel = AtomicSentinelChannel


def register() -> None:
    """Has this process receive with them. By scheme, because the setting `broker_transport` would
    stand in the URLs that Celery logs."""
    for scheme, kind in (
        (TCP, AtomicTransport),
        (TLS, AtomicTransport),
        (SENTINEL, AtomicSentinelTransport),
    ):
        TRANSPORT_ALIASES[scheme] = f"{kind.__module__}:{kind.__name__}"
