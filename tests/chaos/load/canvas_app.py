"""Another team's Celery app: it notes what its tasks are called with at its result backend, which
no fault harms.

Run it as a worker, with CANVAS_BROKER and CANVAS_BACKEND.
"""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery, Task
from redis import Redis

CALLS = "canvas:calls"
"""Redis list at the backend: a JSON object for each call."""

BACKEND = os.environ.get("CANVAS_BACKEND", "redis://nowhere.invalid")

app = Celery(
    "canvas", broker=os.environ.get("CANVAS_BROKER", BACKEND), backend=BACKEND, set_as_current=False
)
app.conf.update(broker_connection_retry_on_startup=True, worker_enable_remote_control=False)


@app.task(name="canvas.note", bind=True)
def note(self: Task, value: Any, *, name: str, of: str) -> Any:
    """Writes down the value of the job `of`, or as an errback the id of the task that failed."""
    again = bool((self.request.delivery_info or {}).get("redelivered"))
    call = {"of": of, "name": name, "id": self.request.id, "again": again, "value": value}
    with Redis.from_url(BACKEND) as redis:
        redis.rpush(CALLS, json.dumps(call))
    return value


@app.task(name="canvas.say")
def say(text: str) -> str:
    """A part of a chord that is no job."""
    return text
