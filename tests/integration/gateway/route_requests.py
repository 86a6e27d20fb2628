"""Requests that would do for any route of the gateway, and its refusals."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import httpx

from tests.integration.gateway.running_gateway import (
    BATCHES,
    CHATS,
    FILES,
    PAUSES,
    PROMPT,
    SCHEDULES,
    WEBHOOKS,
)

BODY = {"model": "clerk", "prompt": PROMPT}
DECISIONS = "/v1/decisions"
ASKED = {
    "model": "clerk",
    "input": PROMPT,
    "questions": [{"type": "predicate", "instructions": "It is late."}],
}
RERANK = {"model": "clerk", "query": PROMPT, "documents": [PROMPT]}
ENCODERS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"model": "clerk", "input": PROMPT},
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/rerank": RERANK,
    "/v1/score": {"model": "clerk", "text_1": PROMPT, "text_2": PROMPT},
}
"""Routes that this model refuses, since it generates text; tests/integration/standalone/
test_encoders.py has their answers."""
WEBHOOK_BODIES: dict[str, dict[str, Any]] = {
    "webhook_endpoints": {"url": "https://a.org/", "name": "a", "event_types": ["job.*"]},
    "rotate_secret": {},
    "test": {"event_type": "job.failed"},
    "replay": {},
}
"""By the last part of a path."""
PAUSE: dict[str, Any] = {"kind": "tag", "target": "nobody=has"}
BULK_BODIES: dict[str, dict[str, Any]] = {
    f"/v1/jobs/{act}": {"filter": {"model": "nobody's"}, **more}
    for act, more in {"cancel": {}, "retry": {}, "prioritize": {"priority": 3}}.items()
}
CHAT = {"model": "clerk", "messages": [{"role": "user", "content": "a"}]}
NO_FILE = "file-00000000-0000-0000-0000-000000000000"
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/messages")


async def ask(
    http: httpx.AsyncClient, method: str, path: str, headers: dict[str, str]
) -> httpx.Response:
    """With a body that would do."""
    content = content_of(path) if method == "POST" else {}
    request = http.build_request(method, path, **content, headers=headers)
    if headers.get("Authorization") == "":
        del request.headers["Authorization"]
    return await http.send(request)


async def status_of(
    http: httpx.AsyncClient, method: str, path: str, headers: dict[str, str], *, file_id: str
) -> int:
    """Of an answer that may never end: only its beginning is waited for. Completions are asked for
    as streams, batches of a file that is there."""
    content = content_of(path, file_id) if method == "POST" else {}
    if path in STREAMED and "json" in content:
        content["json"]["stream"] = True
    async with http.stream(method, path, **content, headers=headers) as reply:
        return reply.status_code


def content_of(path: str, file_id: str = NO_FILE) -> dict[str, Any]:
    """What would do for a route that takes something, as httpx sends it."""
    if path == FILES:
        return {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    if path == BATCHES:
        batch = {"input_file_id": file_id, "endpoint": CHATS, "completion_window": "24h"}
        return {"json": batch}
    if path.startswith(SCHEDULES):
        return {"json": schedule_body(path)}
    return {"json": {**(webhook_body(path) if path.startswith(WEBHOOKS) else body_of(path))}}


def schedule_body(path: str) -> dict[str, Any]:
    """What would do for a route of schedules; each has a name of its own."""
    made = {"name": uuid4().hex, "cron": "0 7 * * *", "request": BODY}
    return made if path == SCHEDULES else {"paused": True}


def webhook_body(path: str) -> dict[str, Any]:
    """What would do for a route of webhook endpoints."""
    return WEBHOOK_BODIES.get(path.rpartition("/")[2], {"name": "b"})


def body_of(path: str) -> dict[str, Any]:
    """What would do for a route that takes one."""
    if path == "/detokenize":
        return {"model": "clerk", "tokens": [1]}
    if path in ("/v1/responses", "/v1/responses/input_tokens"):
        return {"model": "clerk", "input": PROMPT, "background": True}
    if path in (others := {DECISIONS: ASKED, PAUSES: PAUSE, **ENCODERS, **BULK_BODIES}):
        return others[path]
    if path.startswith("/v1/chat/completions/"):
        return {"metadata": {"a": "b"}}
    if path == "/v1/messages":
        return {**CHAT, "max_tokens": 4}
    has_chat = "chat" in path or "messages" in path or path == "/apply-template"
    return CHAT if has_chat else BODY


def check_refusal(reply: httpx.Response, status: int, code: str, what: str) -> None:
    """In OpenAI's form or Anthropic's, and with what HTTP wants beside it."""
    assert reply.status_code == status, f"{what}: {reply.status_code} {reply.text}"
    error = reply.json()["error"]
    if reply.request.url.path.startswith("/v1/messages"):
        assert set(error) == {"message", "type", "details"}, what
        found = error["details"]["error_code"]
    else:
        assert set(error) == {"message", "type", "param", "code"}, what
        found = error["code"]
    assert (found, bool(error["message"])) == (code, True), what
    assert reply.headers.get("www-authenticate", "").startswith("Bearer ") == (
        status in (401, 403)
    ), what
