"""Messages that no worker can make a task of, as the lists of Redis hold them: what a hand-made
client gets wrong."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

SECRET = "nobody else may read this"
BODY = [[], {"model": "m", "prompt": SECRET}, {}]

Envelope = dict[str, Any]


def envelope(task: str, queue: str, body: object = BODY, task_id: str | None = None) -> Envelope:
    """A message as kombu sends it, of Celery's protocol 2."""
    return {
        "body": base64.b64encode(json.dumps(body).encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": task, "id": task_id or str(uuid4())},
        "properties": {
            "body_encoding": "base64",
            "delivery_tag": str(uuid4()),
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": 0,
        },
    }


def _with(**parts: object) -> Callable[[Envelope], Envelope]:
    return lambda whole: {**whole, **{name.replace("_", "-"): part for name, part in parts.items()}}


def _without(*names: str) -> Callable[[Envelope], Envelope]:
    return lambda whole: {name: part for name, part in whole.items() if name not in names}


def _headers(**headers: object) -> Callable[[Envelope], Envelope]:
    """None takes a header away."""
    return lambda whole: {
        **whole,
        "headers": {
            name: value
            for name, value in {**whole["headers"], **headers}.items()
            if value is not None
        },
    }


def _properties(**properties: object) -> Callable[[Envelope], Envelope]:
    return lambda whole: {
        **whole,
        "properties": {
            name: value
            for name, value in {**whole["properties"], **properties}.items()
            if value is not None
        },
    }


def _body(body: object) -> Callable[[Envelope], Envelope]:
    return lambda whole: {**whole, "body": base64.b64encode(json.dumps(body).encode()).decode()}


SPOILED: Mapping[str, Callable[[Envelope], object]] = {
    "a body that is a number": _body(5),
    "a body that is empty": _body([]),
    "a body of one argument": _body([1]),
    "a body without arguments": _body([None, {}, {}]),
    "a body whose keyword arguments are a list": _body([[], [], {}]),
    "a body whose options are a list": _body([[], {}, [1]]),
    "a body that is text": _body(SECRET),
    "a body that is null": _body(None),
    "a body that is no base64": _with(body="%%%"),
    "a body that is half a base64": _with(body="abc"),
    "a body that is no JSON": _with(body=base64.b64encode(b"{" + SECRET.encode()).decode()),
    "a body that is no UTF-8": _with(body=base64.b64encode(b'"\xff\xfe"').decode()),
    "a body nested too deep": _with(body=base64.b64encode(b"[" * 200_000).decode()),
    "a body of kombu's own types": _body([[], {"a": {"__type__": "uuid", "__value__": 5}}, {}]),
    "a body that is a list itself": _with(body=[1]),
    "a body that no bytes stand for": lambda whole: _properties(body_encoding=None)(
        _with(body="\ud800")(whole)
    ),
    "an id that no bytes stand for": _headers(id="\ud800", task="shardline.sumbit"),
    "no body": _without("body"),
    "no content type": _without("content-type"),
    "yaml": _with(content_type="application/x-yaml"),
    "pickle": _with(content_type="application/x-python-serialize"),
    "a content type that is a number": _with(content_type=5),
    "an encoding that is a number": _with(content_encoding=8),
    "an unknown body encoding": _properties(body_encoding="base99"),
    "junk that says it is compressed": _headers(compression="application/x-gzip"),
    "an unknown compression": _headers(compression="best"),
    "headers that are a list": _with(headers=[1]),
    "headers that are text": _with(headers="task"),
    "no headers": _without("headers"),
    "no task": _headers(task=None),
    "a task that is a list": _headers(task=["shardline.submit"]),
    "an unknown task": _headers(task="shardline.sumbit"),
    "no id": _headers(id=None),
    "an id that is a number": _headers(id=5),
    "an id that is a list": _headers(id=[]),
    "an expiry that is no time": _headers(expires="soon"),
    "an eta that is no time": _headers(eta="soon"),
    "no properties": _without("properties"),
    "properties that are a list": _with(properties=[]),
    "no delivery tag": _properties(delivery_tag=None),
    "no delivery info": _properties(delivery_info=None),
    "delivery info that is a list": _properties(delivery_info=[1]),
    "kombu's own types in the envelope": _with(
        headers={"__type__": "uuid", "__value__": {"hex": 5}}
    ),
    "an envelope that is a number": lambda _: 5,
    "an envelope that is a list": lambda _: [1],
    "an envelope that is null": lambda _: None,
}
"""By what is wrong: how it is made of a good one."""

RAW = {"no JSON": "no json {", "nothing": "", "nested too deep": "[" * 200_000}
"""What is no envelope at all."""


def poisons(task: str, queue: str) -> dict[str, str]:
    """By what is wrong: what to push into the list."""
    made = {name: json.dumps(spoil(envelope(task, queue))) for name, spoil in SPOILED.items()}
    return {**made, **RAW}
