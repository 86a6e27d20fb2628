"""The lab's load: one kind of request in 48 variants. And how any request becomes a row. Knows no
door."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

Request = Mapping[str, Any]
"""One flat object, as every door takes it."""

MODEL = "clerk"
NUM_REQUESTS = 48
LENGTHS = (24, 64, 24, 160, 24, 420)
"""Output tokens, in rotation: short ones end between two faults, long ones are caught in the
act."""
MAX_OUTPUT = 1024
"""Of any request of any load: what a model's context may leave."""
MAX_CRASHES = 100
"""Of the lab: heads are killed so often that three in a row meet the same innocent job. Users have
the default."""

INSERT = """
INSERT INTO jobs (id, model, prompt, messages, prompt_ids, params, metadata, idempotency_key,
    priority, max_crashes, retry, not_before, deadline_at)
VALUES (coalesce(%(id)s, gen_random_uuid()), %(model)s, %(prompt)s, %(messages)s,
    %(prompt_ids)s::int[], %(params)s, %(metadata)s, %(idempotency_key)s, %(priority)s,
    %(max_crashes)s, %(retry)s, now() + make_interval(secs => %(delay_s)s),
    now() + make_interval(secs => %(deadline_s)s))
"""
COLUMNS: Final[Mapping[str, Any]] = {
    "model": None,
    "prompt": None,
    "messages": None,
    "metadata": {},
    "idempotency_key": None,
    "priority": 5,
    "max_crashes": 3,
    "retry": None,
    "delay_s": 0.0,
    "deadline_s": None,
}
"""What stands beside `params` in a row, with its default."""


def row(request: Request, job_id: UUID | None) -> Mapping[str, Any]:
    """The values of INSERT."""
    values = {name: request.get(name, default) for name, default in COLUMNS.items()}
    params = {name: value for name, value in request.items() if name not in COLUMNS}
    is_text = isinstance(values["prompt"], str)
    return {
        **values,
        "id": job_id,
        "prompt": values["prompt"] if is_text else None,
        "prompt_ids": None if is_text or values["prompt"] is None else list(values["prompt"]),
        "messages": None if values["messages"] is None else json.dumps(values["messages"]),
        "retry": None if values["retry"] is None else json.dumps(values["retry"]),
        "metadata": json.dumps(values["metadata"]),
        "params": json.dumps(params),
    }


def request(number: int) -> Request:
    """One of the set: half of them greedy, half sampled under seeds of their own."""
    return {
        "model": MODEL,
        "prompt": f"sort: {number}, 7, 30, 12 =",
        "max_tokens": LENGTHS[number % len(LENGTHS)],
        "ignore_eos": True,
        "temperature": 0.8 if (number // len(LENGTHS)) % 2 else 0.0,
        "seed": number,
        "max_crashes": MAX_CRASHES,
    }
