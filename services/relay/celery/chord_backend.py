"""Celery's Redis backend, with chords that outlive their servers. Knows no task.

Celery ends a chord when its body cannot be published, deletes its keys, and counts a chord as done
while another process has claimed it. Here an error of a server leaves the chord as it is: a
repeated end of its last part sends the body. Keys and scripts are Celery's, so that its own workers
may count parts of the same chord.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

from celery.backends.redis import RedisBackend, SentinelBackend
from celery.canvas import Signature, maybe_signature
from celery.exceptions import ChordError
from celery.result import GroupResult, allow_join_result
from kombu.utils.functional import maybe_list
from redis.exceptions import RedisError

from services.relay.loop import REDIS_ERRORS
from shardline.base.redis_url import SENTINEL, TCP, TLS
from shardline.contract.ids import derived_id
from shardline_server.failpoints import Point, failpoint

DONE_S = 300
"""How long a late copy of a part finds that its chord is done, as in Celery."""

RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


PREFIX: ContextVar[str] = ContextVar("PREFIX", default="")
"""What keys of this thread's results begin with."""


@contextmanager
def results_in(prefix: str) -> Iterator[None]:
    """Makes results go where the holder of keys with this prefix looks for them, as Celery's
    `global_keyprefix` does for a whole app."""
    token = PREFIX.set(prefix)
    try:
        yield
    finally:
        PREFIX.reset(token)


class ChordClaimed(Exception):
    """Another process, which may be dead, has claimed the sending of a chord's body."""


class ChordBackend(RedisBackend):
    """Replaces Celery's backend for the URL schemes in `BACKENDS`."""

    def on_chord_part_return(
        self, request: Any, state: str, result: Any, propagate: Any = None, **options: Any
    ) -> None:
        """Counts a part, and sends the body after the last one. May be repeated: a chord that is
        done stays so. Raises ChordClaimed, and what a server's driver raises."""
        del propagate, options
        group_id = request.group
        if not group_id or not request.id:
            return
        claim = uuid4().hex
        is_complete, is_claimed = self._count(request, state, result, claim)
        if not is_complete:
            return
        if not is_claimed:
            raise ChordClaimed(f"another process sends the body of chord {group_id}")
        try:
            self._end(group_id, claim, maybe_signature(request.chord, app=self.app))
        except REDIS_ERRORS:
            with suppress(RedisError):  # Else it expires.
                self.client.eval(RELEASE, 1, self.get_key_for_group(group_id, ".c"), claim)
            raise

    def get_key_for_task(self, task_id: Any, key: Any = "") -> Any:
        """Returns the key of a task's result, which is also the channel that tells of it."""
        return self.key_t(PREFIX.get()) + super().get_key_for_task(task_id, key)

    def fail_from_current_stack(self, task_id: str, exc: BaseException | None = None) -> Any:
        """Stores a failure, unless it is a server's: Celery would store that errbacks were not
        sent as the reason of the end, and not send them again."""
        if isinstance(exc, REDIS_ERRORS):
            raise exc
        return super().fail_from_current_stack(task_id, exc=exc)

    def _count(self, request: Any, state: str, result: Any, claim: str) -> tuple[bool, bool]:
        """Returns whether all parts are there, and whether this call may send the body."""
        encoded = self.encode([1, request.id, state, self.encode_result(result, state)])
        place = "+inf" if request.group_index is None else request.group_index
        keys = [self.get_key_for_group(request.group, end) for end in (".j", ".t", ".s", ".d")]
        keys += [self.get_key_for_group(request.group), self.get_key_for_group(request.group, ".c")]
        is_ordered = 1 if self._chord_zset else 0
        expiries = [self.chord_expires or 0, self._chord_result_expires, self._claim_s()]
        num_ready, num_more, size, is_claimed = self._chord_part_return_script(
            keys=keys,
            args=[request.id, encoded, is_ordered, place, *expiries, claim],
            client=self.client,
        )
        return bool(size) and num_ready == int(size) + int(num_more or 0), bool(is_claimed)

    def _claim_s(self) -> int:
        return max(5, int(self.app.conf.result_chord_join_timeout * 2))

    def _end(self, group_id: str, claim: str, body: Signature) -> None:
        """Sends the body, or fails it with what is wrong with a part or the body itself."""
        try:
            values = self._values(group_id)
            failpoint(Point.CHORD_JOINED)
            self._keep_claim(group_id, claim, body)
            self.app.amqp._retry_publish(body.delay, values)  # noqa: SLF001 (as Celery's own does)
        except (*REDIS_ERRORS, ChordClaimed):
            raise
        except ChordError as error:
            self._fail(group_id, body, error)
        except Exception as error:  # noqa: BLE001 (whatever the body's own options raise)
            self._fail(group_id, body, ChordError(f"Callback error: {error!r}"))
        ends = (".c", ".j", ".t", ".s", ".d")
        keys = [self.get_key_for_group(group_id, end) for end in ends]
        self._chord_cleanup_script(keys=keys, args=[claim, DONE_S], client=self.client)

    def _keep_claim(self, group_id: str, claim: str, body: Signature) -> None:
        """Claims the chord for as long as publishing may take. Raises ChordClaimed."""
        keys = [self.get_key_for_group(group_id, end) for end in (".c", ".s")]
        publish_s = self._chord_publish_claim_expires(self._claim_s(), body)
        args = [claim, publish_s]
        if not self._chord_claim_extend_script(keys=keys, args=args, client=self.client):
            raise ChordClaimed(f"another process took over chord {group_id}")

    def _values(self, group_id: str) -> Sequence[Any]:
        """The values of the parts, in order. Raises ChordError."""
        header = GroupResult.restore(group_id, app=self.app)
        if header is None:
            key = self.get_key_for_group(group_id, ".j")
            read = self.client.zrange if self._chord_zset else self.client.lrange
            return [self._unpack_chord_result(part, self.decode) for part in read(key, 0, -1)]
        # Groups within the group: Celery saved it, so that the body gets their values nested.
        header.on_ready()
        join = header.join_native if header.supports_native_join else header.join
        try:
            with allow_join_result():
                return list(join(timeout=self.app.conf.result_chord_join_timeout, propagate=True))
        except REDIS_ERRORS:
            raise
        except Exception as error:
            raise ChordError(f"Join error: {error!r}") from error

    def _fail(self, group_id: str, body: Signature, error: ChordError) -> None:
        """Fails the body. Its errbacks get ids by their places: a repeat sends none twice."""
        for place, errback in enumerate(maybe_list(body.options.get("link_error")) or ()):
            if not errback.get("subtask_type"):
                errback_id = str(derived_id(f"{group_id} link_error {place}"))
                errback["options"].setdefault("task_id", errback_id)
        self.chord_error_from_stack(body, error)


class SentinelChordBackend(ChordBackend, SentinelBackend):
    """Asks Sentinels for the server."""


BACKENDS = {
    scheme: f"{kind.__module__}:{kind.__qualname__}"
    for scheme, kind in (
        (TCP, ChordBackend),
        (TLS, ChordBackend),
        (SENTINEL, SentinelChordBackend),
    )
}
"""By scheme of URL; Celery's setting `override_backends`."""
