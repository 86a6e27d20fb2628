"""Bodies of `POST /v1/decisions` as jobs, one for each question: each has the input first, so that
they share its KV."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import msgspec

from services.gateway.decisions.bodies import DecisionRequest
from services.gateway.field_names import renaming
from services.gateway.http.json_body import Document
from shardline.base.errors import Invalid
from shardline.contract.ids import new_id
from shardline.contract.job import JobRequest
from shardline.contract.request_parsing import check_request, parse_fields, shown

TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of parts by the field that has their text."""

FURTHER_FIELDS = frozenset({"type", "phase", "status", "id"})
"""Of a message: none of them changes what a model reads."""


def decision_request(document: Document) -> DecisionRequest:
    """Parse the body of `POST /v1/decisions`. Raises Invalid."""
    fields = dict(document)
    if isinstance(given := fields.get("input"), list):
        fields["input"] = [_message(item, f"input[{place}]") for place, item in enumerate(given)]
    if isinstance(questions := fields.get("questions"), list):
        fields["questions"] = [
            _with_text(question, "instructions", f"questions[{place}]")
            for place, question in enumerate(questions)
        ]
    return parse_fields(fields, DecisionRequest)


def question_jobs(request: DecisionRequest) -> list[JobRequest]:
    """One job for each question; the first has the request's id and key. Raises Invalid."""
    shared: dict[str, Any] = {
        name: getattr(request, name)
        for name in JobRequest.__struct_fields__
        if name not in ("prompt", "messages", "question", "id", "idempotency_key")
    }
    shared["prompt" if isinstance(request.input, str) else "messages"] = request.input
    jobs: list[JobRequest] = []
    for place, question in enumerate(request.questions):
        job = JobRequest(
            **shared,
            question=question,
            id=new_id() if place or request.id is None else request.id,
            idempotency_key=None if place else request.idempotency_key,
        )
        with naming(place):
            jobs.append(check_request(job))
    return jobs


def naming(place: int) -> AbstractContextManager[None]:
    """Names the fields of errors as the body of the request has them: `questions[3].levels`."""
    return renaming({"question": f"questions[{place}]", "prompt": "input", "messages": "input"})


def _message(item: Any, field: str) -> Any:
    """A message with its parts as one text. `parse_fields` refuses what is no object."""
    if not isinstance(item, dict):
        return item
    if (kind := item.get("type")) not in (None, "message"):
        problem = f"{shown(str(kind))!r} is not supported"
        raise Invalid(f"{field}.type", problem, "Send messages of text")
    kept = {name: value for name, value in item.items() if name not in FURTHER_FIELDS}
    return _with_text(kept, "content", field)


def _with_text(fields: Any, name: str, field: str) -> Any:
    """The object with a list of parts joined by lines."""
    if not isinstance(fields, dict) or not isinstance(parts := fields.get(name), list):
        return fields
    texts = [_text(part, f"{field}.{name}[{place}]") for place, part in enumerate(parts)]
    return {**fields, name: "\n".join(texts)}


def _text(part: Any, field: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_json" and isinstance(part.get("data"), dict | list):
        return msgspec.json.encode(part["data"]).decode()
    text = part.get(TEXTS[kind]) if isinstance(kind, str) and kind in TEXTS else None
    if not isinstance(text, str):
        problem = "only parts of text and JSON are supported"
        raise Invalid(field, problem, 'Send {"type": "input_text", "text": …} or a string')
    return text
