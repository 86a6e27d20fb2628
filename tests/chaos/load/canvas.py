"""The sixth door: a Celery app with a canvas, in which our task is one among its own. Knows what
must follow a job.

A request is sent again under its own id with the same canvas, as at any door: what follows it still
comes once.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from celery import Celery, chain, chord, group
from celery.backends.redis import RedisBackend

from shardline.base.config import Settings
from shardline.contract.queues import INTAKE_QUEUE, SUBMIT_TASK, celery_settings
from tests.chaos.load.doors import PATIENCE_S, TAKEN, Answer, Door
from tests.chaos.load.requests import Request
from tests.chaos.load.workload import MARK, SUCCEEDED, Dress

DOOR = "canvas"
LATE = "late"
KINDS = ("link", "links", "chain", "chord")
FOLLOWED_BY: Mapping[str, frozenset[str]] = {
    "link": frozenset({"link"}),
    "links": frozenset({"first", "second", "of a chain", "of a group", "also of a group"}),
    "chain": frozenset({"next"}),
    "chord": frozenset({"body"}),
    LATE: frozenset({"link"}),
}
"""The calls that a success is followed by."""

ERRBACK = "errback"
LATE_SHARE = 0.2
BEGINS_S = 60.0
EXPIRES_S = (0.1, 2.0)


def dress(rng: random.Random) -> Dress:
    """Most jobs succeed; some expire before they begin, and are followed by their errback."""
    if rng.random() >= LATE_SHARE:
        return Dress()
    fields = {"metadata": MARK, "delay_s": BEGINS_S, "deadline_s": rng.uniform(*EXPIRES_S)}
    return Dress(fields=fields, ends=frozenset({"expired"}))


def kind_of(job_id: UUID, request: Request) -> str:
    """Which canvas a job is part of."""
    return LATE if "deadline_s" in request else KINDS[job_id.int % len(KINDS)]


def followers(kind: str, state: str) -> frozenset[str]:
    """The names of all calls that must come, once each, when a job ends so."""
    return FOLLOWED_BY[kind] if state in SUCCEEDED else frozenset({ERRBACK})


class Unheard(RedisBackend):
    """A backend for a producer that waits for no result: it does not listen for each."""

    def on_task_call(self, *_: Any) -> None:
        """Of a task that is sent."""

    def add_pending_result(self, result: Any, **_: Any) -> Any:
        """Of a part of a chord."""
        return result


def canvas_app(broker_url: str, backend_url: str) -> Celery:
    """A producer's. Its backend is a Redis, which counts chords."""
    app = Celery("canvas-producer", backend=backend_url, set_as_current=False)
    app.loader.override_backends = {"redis": f"{__name__}:{Unheard.__name__}"}
    settings = celery_settings(Settings(redis_url=broker_url))
    app.conf.update({name: value for name, value in settings.items() if name.startswith("broker")})
    # Priorities of our queues are steps that another team's worker does not look into.
    app.conf.broker_transport_options = {
        "socket_timeout": PATIENCE_S,
        "socket_connect_timeout": PATIENCE_S,
    }
    return app


def by_canvas(broker_url: str, backend_url: str) -> Door:
    """Redis has it; the row comes later, and the calls after its end."""
    app = canvas_app(broker_url, backend_url)

    def submit(job_id: UUID | None, request: Request) -> Answer:
        assert job_id is not None
        _send(app, job_id, request)
        return TAKEN

    return submit


def _send(app: Celery, job_id: UUID, request: Request) -> None:
    def note(name: str) -> Any:
        return app.signature("canvas.note", kwargs={"name": name, "of": str(job_id)})

    options = {"task_id": str(job_id), "queue": INTAKE_QUEUE}
    job = app.signature(SUBMIT_TASK, kwargs=dict(request), **options).on_error(note(ERRBACK))
    say = app.signature("canvas.say", args=("part",))
    kind = kind_of(job_id, request)
    if kind == "chord":
        chord([job, say], app=app)(note("body"), retry=False)
    elif kind == "chain":
        chain(job, note("next"), app=app).apply_async(retry=False)
    elif kind == "links":
        whole = group(note("of a group"), note("also of a group"), app=app)
        for link in (note("first"), note("second"), chain(note("of a chain"), say, app=app), whole):
            job.link(link)
        job.apply_async(retry=False)
    else:
        job.link(note("link"))
        job.apply_async(retry=False)
