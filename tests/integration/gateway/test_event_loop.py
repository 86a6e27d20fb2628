"""Long answers are built on threads: whatever a job has written, other requests proceed."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from services.gateway.http import event_loop
from shardline_server.replies import ReplyParser
from shardline_server.tokenize import TokenTexts
from tests.integration.gateway.running_gateway import CHATS, PROMPT, RESPONSES
from tests.tiny_head import TinyHead

COMPLETIONS: Any = {"model": "clerk", "prompt": PROMPT, "logprobs": 2}
CHAT: Any = {
    "model": "clerk",
    "messages": [{"role": "user", "content": PROMPT}],
    "logprobs": True,
    "top_logprobs": 2,
}
MESSAGE: Any = {"model": "clerk", "messages": CHAT["messages"], "max_tokens": 32}
RESPONSE: Any = {
    "model": "clerk",
    "input": PROMPT,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETIONS),
        ("/v1/completions", {**COMPLETIONS, "n": 2}),
        (CHATS, CHAT),
        ("/v1/messages", MESSAGE),
        (RESPONSES, RESPONSE),
    ],
    ids=["completion", "choices", "chat", "message", "response"],
)
async def test_a_long_answer_is_built_on_a_thread(
    http: httpx.AsyncClient,
    head: TinyHead,
    builders: set[str],
    path: str,
    body: Any,
    *,
    is_streamed: bool,
) -> None:
    with head.serving():
        reply = await http.post(path, json={**body, "stream": is_streamed})
    assert reply.status_code == 200, reply.text
    assert builders
    assert threading.main_thread().name not in builders


async def test_a_long_stored_completion_is_built_on_a_thread(
    http: httpx.AsyncClient, head: TinyHead, builders: set[str]
) -> None:
    with head.serving():
        stored = (await http.post(CHATS, json={**CHAT, "store": True})).json()
    builders.clear()
    listed = (await http.get(CHATS)).json()["data"]
    assert [one["choices"] for one in listed] == [stored["choices"]]
    assert builders
    assert threading.main_thread().name not in builders


@pytest.fixture
def builders(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The threads that made texts of tokens or read replies, while each answer counts as long."""
    found: set[str] = set()
    monkeypatch.setattr(event_loop, "MAX_AT_ONCE", 0)
    for kind, name in ((TokenTexts, "push"), (ReplyParser, "push_parts")):
        method = getattr(kind, name)

        def noted(self: Any, *arguments: Any, method: Any = method, **options: Any) -> Any:
            if arguments[0]:
                found.add(threading.current_thread().name)
            return method(self, *arguments, **options)

        monkeypatch.setattr(kind, name, noted)
    return found
