"""A batch of the load: the lines of its file, good ones and broken ones, and what was heard of it.
Knows no server."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any

from tests.chaos.load.callers import openai_form
from tests.chaos.load.encoders.texts import is_pair
from tests.chaos.load.requests import Request
from tests.chaos.load.responder import is_chat, response_form
from tests.chaos.load.workload import Workload, is_completion

MARK = "chaos, batches"
"""In the metadata of its jobs, which have the batch, the line and the request's number beside
it."""
FAR_S = 3600.0
SHORT_TOKENS = 24
NUM_CHOICES = 2
CHOOSES = 0.1
"""Share of completions' lines that ask for several choices."""

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
DECISIONS = "/v1/decisions"
EMBEDDINGS = "/v1/embeddings"


class BatchKind(StrEnum):
    """What is to become of it."""

    PLAIN = "plain"
    BROKEN = "broken"
    """Many lines, of which few are requests: reading them takes several transactions."""
    LARGE = "large"
    """Many lines, all of them short requests."""
    CANCELLED = "cancelled"
    EXPIRING = "expiring"
    """Most of its lines begin after its end."""
    REFUSED = "refused"
    """Its file is none."""


ENDS: Mapping[BatchKind, frozenset[str]] = MappingProxyType(
    {
        BatchKind.PLAIN: frozenset({"completed"}),
        BatchKind.BROKEN: frozenset({"completed"}),
        BatchKind.LARGE: frozenset({"completed"}),
        BatchKind.CANCELLED: frozenset({"cancelled", "completed"}),
        BatchKind.EXPIRING: frozenset({"expired"}),
        BatchKind.REFUSED: frozenset({"failed"}),
    }
)
NUM_LINES: Mapping[BatchKind, tuple[int, int]] = MappingProxyType(
    {
        BatchKind.PLAIN: (2, 12),
        BatchKind.BROKEN: (300, 700),
        BatchKind.LARGE: (150, 250),
        BatchKind.CANCELLED: (20, 60),
        BatchKind.EXPIRING: (4, 30),
        BatchKind.REFUSED: (2, 6),
    }
)
BROKEN: Mapping[BatchKind, float] = MappingProxyType(
    {
        BatchKind.PLAIN: 0.1,
        BatchKind.BROKEN: 0.99,
        BatchKind.LARGE: 0.02,
        BatchKind.CANCELLED: 0.1,
        BatchKind.EXPIRING: 0.1,
        BatchKind.REFUSED: 0.0,
    }
)
"""Shares of lines that are no requests."""
DELAYED = 0.9
"""Share of an expiring batch's lines that begin after its end."""


def _decision_form(request: Request) -> dict[str, Any]:
    body = dict(request)
    body["input"] = body.pop("messages", None) or body.pop("prompt")
    body["questions"] = [body.pop("question")]
    return body


def _embedding_form(request: Request) -> dict[str, Any]:
    body = dict(request)
    return {"input": body.pop("prompt"), **body}


def _completion_form(request: Request) -> dict[str, Any]:
    _, body = openai_form(request)
    return {**body, "return_token_ids": True}


@dataclass(frozen=True, slots=True)
class LineForm:
    """Which requests a route takes, and their bodies."""

    fits: Callable[[Request], bool]
    body: Callable[[Request], dict[str, Any]]


FORMS: Mapping[str, LineForm] = MappingProxyType(
    {
        CHATS: LineForm(is_chat, _completion_form),
        COMPLETIONS: LineForm(
            lambda request: is_completion(request) and "messages" not in request, _completion_form
        ),
        RESPONSES: LineForm(is_chat, response_form),
        DECISIONS: LineForm(lambda request: "question" in request, _decision_form),
        EMBEDDINGS: LineForm(lambda request: not is_pair(request), _embedding_form),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentLine:
    """A line of a file. `number` is of the request that it asks for; None: it is broken."""

    custom_id: str | None
    number: int | None
    content: str
    num_choices: int = 1


@dataclass(slots=True, kw_only=True)
class SentBatch:
    """One batch, and what its caller heard of it."""

    name: str
    """Its idempotency key, and in the metadata of its jobs."""
    kind: BatchKind
    endpoint: str
    lines: Sequence[SentLine]
    cancel_s: float = 0.0
    """After its creation, of one that is to be cancelled."""
    file_id: str | None = None
    created_s: float | None = None
    is_cancelled: bool = False
    """The door has said so."""
    document: Mapping[str, Any] = field(default_factory=dict)
    """As it was answered last."""
    early: dict[str, bytes] = field(default_factory=dict)
    """Lines by their ids, as they were read while the batch ran."""
    files: dict[str, bytes] = field(default_factory=dict)
    """What its two files had at its end, by the names of their fields."""
    again: dict[str, bytes] = field(default_factory=dict)
    """The same once more, when the load was over."""

    @property
    def has_ended(self) -> bool:
        """As its caller knows."""
        return self.document.get("status") in ("completed", "failed", "expired", "cancelled")

    def is_to_be_cancelled(self, now_s: float) -> bool:
        """Whether its time has come."""
        if self.kind is not BatchKind.CANCELLED or self.is_cancelled or self.created_s is None:
            return False
        return now_s - self.created_s >= self.cancel_s

    @property
    def content(self) -> bytes:
        """Its file."""
        return "\n".join(line.content for line in self.lines).encode()

    @property
    def window(self) -> str:
        """Its `completion_window`."""
        return "1m" if self.kind is BatchKind.EXPIRING else "24h"


def draw_batch(workload: Workload, rng: random.Random, kind: BatchKind) -> SentBatch:
    """One of this kind, for any of the routes that the models have."""
    name = f"{rng.getrandbits(64):016x}"
    endpoints = (CHATS, COMPLETIONS, DECISIONS, RESPONSES)
    endpoint = rng.choice(endpoints if workload.generates else (EMBEDDINGS,))
    if kind is BatchKind.LARGE and workload.generates:
        endpoint = COMPLETIONS
    lines = list(_lines(workload, rng, kind, endpoint, name))
    if kind is BatchKind.REFUSED:
        # No two lines may have one custom_id.
        lines.append(lines[0])
    return SentBatch(
        name=name, kind=kind, endpoint=endpoint, lines=lines, cancel_s=rng.uniform(0.0, 8.0)
    )


def _lines(
    workload: Workload, rng: random.Random, kind: BatchKind, endpoint: str, name: str
) -> Iterator[SentLine]:
    form = FORMS[endpoint]
    for place in range(1, 1 + rng.randint(*NUM_LINES[kind])):
        custom_id = f"{name}-{place}"
        # The first one is good: a file without any JSON is none.
        if place > 1 and rng.random() < BROKEN[kind]:
            content, is_named = rng.choice(_broken(custom_id, endpoint, workload.models[0]))
            yield SentLine(custom_id=custom_id if is_named else None, number=None, content=content)
            continue
        number = workload.draw_number(rng, partial(_fits, kind, form))
        body = form.body(workload.requests[number])
        body["metadata"] = {
            "asked_by": MARK, "batch": name, "line": str(place), "number": str(number)
        }  # fmt: skip
        num_choices = 1
        if endpoint in (CHATS, COMPLETIONS) and rng.random() < CHOOSES:
            body["n"] = num_choices = NUM_CHOICES
        if kind is BatchKind.EXPIRING and (place == 1 or rng.random() < DELAYED):
            body["delay_s"] = FAR_S
        yield SentLine(
            custom_id=custom_id,
            number=number,
            content=_line(custom_id, endpoint, body),
            num_choices=num_choices,
        )


def _fits(kind: BatchKind, form: LineForm, request: Request) -> bool:
    """Of a large batch only short ones: it shall end."""
    if kind is not BatchKind.LARGE or form is FORMS[EMBEDDINGS]:
        return form.fits(request)
    return form.fits(request) and request.get("max_tokens", SHORT_TOKENS + 1) <= SHORT_TOKENS


def _broken(custom_id: str, endpoint: str, model: str) -> Sequence[tuple[str, bool]]:
    """Lines that are no requests, and whether their errors name the custom_id."""
    return (
        (_line(custom_id, endpoint, {"model": "none"}), True),
        (_line(custom_id, endpoint, {"model": model, "temperature": 9}), True),
        (_line(custom_id, endpoint, {"model": model, "no such field": 1}), True),
        (json.dumps({"custom_id": custom_id, "method": "POST", "url": endpoint}), True),
        (json.dumps({"method": "POST", "url": endpoint, "body": {}}), False),
        ('{"custom_id": ', False),
        ("[]", False),
    )


def _line(custom_id: str, endpoint: str, body: Mapping[str, Any]) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body})
