"""Keeps a Celery worker alive whatever its queues hold: a message that is no task ends alone, and
is reported.

Left alone, Celery (5.7) ends the worker, with status 0, over a message that it cannot take apart,
and kombu puts the message back for the next worker. Only workers import this; it knows no task and
no job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty
from traceback import walk_tb
from typing import Any

from kombu.utils import json as kombu_json

from shardline.store.connection.encoding import storable

MAX_TOLD = 200
"""Characters of an error, which is logged."""
MAX_ID = 64

SHAPE = "its body is not [arguments, keyword arguments, options], as Celery's protocol 2 has it"


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedMessage:
    """A message that no task can be made of."""

    task_id: str
    """The id in its headers; empty if it has none."""
    body: str
    """As it came, for a person to look at: it may hold a prompt."""
    problem: str
    queue: str
    """Where it came from, in the words of the worker's transport; empty if it is not known."""


class MessageGuard:
    """Guards one worker's consumer, over all of its connections. `tell` hears of each refused
    message before that is acknowledged; what it raises as a lost connection leaves the message
    where it was. `check` raises for a task that this worker wants no more than those."""

    def __init__(
        self,
        consumer: Any,
        tell: Callable[[RefusedMessage], None],
        check: Callable[[Any], None],
    ) -> None:
        self._consumer = consumer
        self._tell = tell
        self._check = check
        self._create_task_handler: Callable[[], Callable[[Any], None]] = (
            consumer.create_task_handler
        )
        consumer.create_task_handler = self._create_guarded
        # Celery's own would log the message whole, and wait for the result backend in the worker's
        # one thread.
        consumer.on_decode_error = self._refuse
        consumer.on_invalid_task = lambda _, message, error: self._refuse(message, error)
        consumer.on_unknown_task = lambda _, message, error: self._refuse(
            message, f"no task is named {error}"
        )
        consumer.on_unknown_message = lambda _, message: self._refuse(message, "it names no task")

    def watch(self, transport: Any) -> None:
        """Call it at each connect, with kombu's transport."""
        deliver = transport._deliver  # noqa: SLF001 (kombu's one seam)
        on_readable = transport.cycle.on_readable

        def guarded_deliver(message: Any, queue: str) -> None:
            try:
                deliver(message, queue)
            except self._recoverable:
                raise
            except Exception as error:  # noqa: BLE001 (an envelope ends alone)
                headers = message.get("headers") if isinstance(message, dict) else None
                self._tell(_refused(headers, json.dumps(message, default=str), error, queue))

        def guarded_read(descriptor: int) -> None:
            try:
                on_readable(descriptor)
            except Empty:
                raise
            except self._recoverable:
                raise
            except Exception as error:
                if not _is_unreadable(error):
                    raise
                # It is out of the queue: the error has what is left of it.
                self._tell(_refused(None, str(getattr(error, "doc", "")), error))

        transport._deliver = guarded_deliver  # noqa: SLF001 (as above)
        transport.cycle.on_readable = guarded_read

    @property
    def _recoverable(self) -> tuple[type[Exception], ...]:
        """Errors over which Celery connects again. kombu counts KeyError among them, which is what
        an envelope without a field raises."""
        errors = (*self._consumer.connection_errors, *self._consumer.channel_errors)
        return tuple(error for error in errors if error is not KeyError)

    def _create_guarded(self) -> Callable[[Any], None]:
        handle = self._create_task_handler()

        def guarded(message: Any) -> None:
            try:
                _check(message.headers, message.payload)
                self._check(message)
                handle(message)
            except self._recoverable:
                raise
            except Exception as error:  # noqa: BLE001 (a message ends alone)
                self._refuse(message, error)

        return guarded

    def _refuse(self, message: Any, problem: object) -> None:
        body = message.body
        text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body)
        queue = str((message.delivery_info or {}).get("routing_key"))
        self._tell(_refused(message.headers, text, problem, queue))
        if not message.acknowledged:
            message.reject()


def _refused(headers: object, body: str, problem: object, queue: str = "") -> RefusedMessage:
    task_id = headers.get("id", "") if isinstance(headers, dict) else ""
    text = str(problem)
    if isinstance(problem, Exception):
        text = f"Celery cannot read it: {type(problem).__name__}: {problem}"
    text = text.replace("\n", " ")[:MAX_TOLD]
    return RefusedMessage(
        task_id=storable(str(task_id)[:MAX_ID]),
        body=storable(body),
        problem=storable(text),
        queue=queue,
    )


def _check(headers: object, payload: object) -> None:
    """Raises ValueError or TypeError for what a worker's pool would fail on, where nothing reports
    it. Celery's protocol 1, and the form between both, are mappings."""
    if (
        isinstance(headers, dict)
        and "task" in headers
        and not (headers.get("id") and isinstance(headers["id"], str))
    ):
        raise ValueError("its header `id` is no text")
    if isinstance(payload, dict):
        parts: Sequence[object] = payload.get("args", ()), payload.get("kwargs", {}), {}
    elif isinstance(payload, list | tuple) and len(payload) == 3:
        parts = payload
    else:
        raise ValueError(SHAPE)
    args, kwargs, embed = parts
    if not (
        isinstance(args, list | tuple)
        and isinstance(kwargs, dict)
        and isinstance(embed, dict | None)
    ):
        raise TypeError(SHAPE)


def _is_unreadable(error: Exception) -> bool:
    """Whether kombu's JSON gave up, and nothing else."""
    return any(
        frame.f_code is kombu_json.loads.__code__ for frame, _ in walk_tb(error.__traceback__)
    )
