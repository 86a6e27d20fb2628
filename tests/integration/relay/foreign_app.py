"""Another team's Celery app, as Celery's documentation would have it: it knows nothing of ours but
a task's name.

Its tasks write down what they are called with. Run it as a worker, with FOREIGN_BROKER and
FOREIGN_BACKEND.
"""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery, Task
from redis import Redis

CALLS = "foreign:calls"
"""Redis list: one JSON array for each call, of the task's name and its arguments."""

BROKER = os.environ.get("FOREIGN_BROKER", "redis://nowhere.invalid")

app = Celery(
    "foreign", broker=BROKER, backend=os.environ.get("FOREIGN_BACKEND"), set_as_current=False
)


def submit(*args: Any, **fields: Any) -> Any:
    """A signature of our task: a prompt, or what the task before it gives."""
    return app.signature(
        "shardline.submit", args=args, kwargs={"model": "m", **fields}, queue="shardline.intake"
    )


def _note(name: str, *args: Any) -> None:
    with Redis.from_url(BROKER) as redis:
        redis.rpush(CALLS, json.dumps([name, *args]))


@app.task(name="foreign.take")
def take(value: Any) -> Any:
    """Writes down the value of the task before it."""
    _note("take", value)
    return value


@app.task(name="foreign.also_take")
def also_take(value: Any) -> None:
    """Another callback."""
    _note("also_take", value)


@app.task(name="foreign.blame")
def blame(task_id: str) -> None:
    """An errback, as a task of another app has it: it gets the id of the task that failed."""
    _note("blame", task_id)


@app.task(name="foreign.say")
def say(text: str) -> str:
    """Before ours in a chain."""
    return text


@app.task(name="foreign.fail")
def fail() -> None:
    """Raises."""
    raise ValueError("as it should")


@app.task(name="foreign.replaced", bind=True)
def replaced(self: Task, text: str) -> Any:
    """Becomes a task of ours, under its own id."""
    raise self.replace(submit(text))
