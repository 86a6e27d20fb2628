"""What Celery does at the end of a task, done by us for a job: callbacks, chain, result, chord,
errbacks.

Owns the order, which is Celery's, and the app that sends. Each step may be repeated: what was sent
is not sent again. Knows no Postgres.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.canvas import maybe_signature

from services.relay import plain_json
from services.relay.celery.chord_backend import BACKENDS, ChordBackend, results_in
from services.relay.celery.once_transport import once_transport, sending
from services.relay.settings import RelaySettings
from shardline.contract.job import JobState
from shardline.contract.keys import task_sends
from shardline.contract.queues import INTAKE_QUEUE, SUBMIT_TASK
from shardline.contract.tenants.tenant_door import TenantDoor
from shardline_server.celery_results import (
    TIMEOUT_S,
    completion,
    error_of,
    failure_text,
    results_app,
)
from shardline_server.store.celery_tasks import EndedTask

CALLBACK_QUEUE = "celery"
"""Celery's own default, for callbacks that name no queue: they are other apps' tasks."""

NOT_OURS = ("priority_steps", "queue_order_strategy")
"""How our queues tell priorities apart. Workers of other apps look only into the steps that kombu
has by default."""


def make_ends_app(settings: RelaySettings) -> Celery:
    """The app that sends callbacks and stores results."""
    celery = settings.celery()
    shared = celery["broker_transport_options"]
    options = {name: value for name, value in shared.items() if name not in NOT_OURS}
    app = results_app(
        settings,
        "shardline.ends",
        broker_transport=once_transport(celery["broker_url"]),
        broker_transport_options=options
        | {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S},
        broker_connection_timeout=TIMEOUT_S,
        task_default_queue=CALLBACK_QUEUE,
        task_routes={SUBMIT_TASK: {"queue": INTAKE_QUEUE}},
        result_chord_join_timeout=TIMEOUT_S,
    )
    app.loader.override_backends = BACKENDS
    return app


class TaskEnds:
    """`has_backend` is False where results go nowhere. Threads share it: Celery has a pool for
    each."""

    def __init__(self, app: Celery, *, has_backend: bool) -> None:
        self._app = app
        self._has_backend = has_backend

    def needs_backend(self, ended: EndedTask) -> bool:
        """Whether more than `call_back` is due."""
        context = _context(ended)
        if ended.state is not JobState.SUCCEEDED:
            return True
        return self._has_backend and (not context.ignore_result or bool(context.chord))

    def call_back(self, ended: EndedTask) -> None:
        """Send what a success is followed by: callbacks, and the next task of its chain. Asks no
        result backend."""
        if ended.state is not JobState.SUCCEEDED:
            return
        context = _context(ended)
        value = task_value(ended)
        parent: dict[str, Any] = {"parent_id": context.id, "root_id": context.root_id or context.id}
        with self._sending(ended):
            for callback in context.callbacks or ():
                maybe_signature(callback, app=self._app).apply_async((value,), **parent)
            if context.chain:
                following = maybe_signature(context.chain[-1], app=self._app)
                following.apply_async((value,), chain=context.chain[:-1], **parent)

    @contextmanager
    def _sending(self, ended: EndedTask) -> Iterator[None]:
        # Signatures within signatures are sent by the app that is current, in this thread.
        self._app.set_current()
        with sending(task_sends(ended.task_id)):
            yield

    def finish(self, ended: EndedTask) -> None:
        """Store the result and count the part of a chord; of one that did not succeed also end its
        chain and send its errbacks. May raise anything that the backend's driver does."""
        context = _context(ended)
        if not self._has_backend:
            # Nothing counts parts or knows how chained tasks ended: Celery's disabled backend
            # raises when asked.
            context.update(chord=None, chain=None)
        backend = self._app.backend
        is_stored = self._has_backend and not context.ignore_result
        prefix = ""
        if context.get("door") is not None:
            # Its keys are the tenant's to read. Other backends cannot tell tenants apart.
            prefix = TenantDoor(context.door).results
            is_stored = is_stored and isinstance(backend, ChordBackend)
        with self._sending(ended), results_in(prefix):
            if ended.state is JobState.SUCCEEDED:
                backend.mark_as_done(
                    context.id, task_value(ended), request=context, store_result=is_stored
                )
                return
            backend.mark_as_failure(
                context.id,
                error_of(ended.state, failure_text(ended.error)),
                request=context,
                store_result=is_stored,
                state="FAILURE" if ended.state is JobState.FAILED else "REVOKED",
            )


def _context(ended: EndedTask) -> Context:
    """Celery's request of the task, as it was kept."""
    kept: Mapping[str, Any] = plain_json.loads(ended.request) if ended.request else {}
    return Context({"id": ended.task_id, "delivery_info": {}, "task": SUBMIT_TASK, **kept})


def task_value(ended: EndedTask) -> dict[str, Any]:
    """What the sender of a task gets, and the next task of its chain."""
    return completion(
        job_id=str(ended.job_id),
        text=ended.text or "",
        token_ids=ended.token_ids or (),
        finish_reason=ended.finish_reason or "",
        num_prompt=ended.prompt_tokens or 0,
        decision=ended.decision,
        reasoning=ended.reasoning,
        tool_calls=ended.tool_calls,
        embedding=ended.embedding,
        score=ended.score,
    )
