"""Input items that name items of earlier responses: read as if they were written out, refused where
they are not there."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import httpx
import pytest
from openai import AsyncOpenAI
from sqlalchemy import Engine, event, text

from services.gateway.responses.output_items import CallItem
from services.gateway.responses.references import MAX_RESPONSES, as_sent
from shardline.base.errors import Invalid
from shardline.contract.api_key import bearer
from shardline.contract.job import JobState
from shardline.store import responses as response_rows
from tests.integration.gateway.running_gateway import (
    PROMPT,
    RESPONSES,
    claimed,
    make_key,
)
from tests.integration.gateway.test_batches import ENDED, begin, line, lines_of, until
from tests.integration.gateway.test_openai_client import official
from tests.tiny_head import TinyHead

ASKED: dict[str, Any] = {"model": "clerk", "input": PROMPT}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
SAID = (
    "<think>hm</think>Yes. "
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
)
QUESTION = {"role": "user", "content": "sum: 3 ="}
STORED = text("""
SELECT jobs.messages, jobs.prompt_ids, responses.input FROM jobs
JOIN responses ON responses.job_id = jobs.id WHERE 'resp_' || jobs.id = :id
""")


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with official(http) as client:
        yield client


def reference(item_id: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id}


def stored(head: TinyHead, response_id: str) -> Any:
    """What a response's model read, and the items that it was asked with."""
    with head.database.connect() as connection:
        return connection.execute(STORED, {"id": response_id}).one()


@contextmanager
def reads() -> Iterator[list[str]]:
    """The statements that read responses meanwhile."""
    found: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.strip().startswith("SELECT") and "JOIN responses" in statement:
            found.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", note)


async def with_calls(http: httpx.AsyncClient, head: TinyHead) -> dict[str, Any]:
    """A response that thinks, speaks and calls twice."""
    asked = {**ASKED, "tools": [ADD], "background": True}
    response_id = (await http.post(RESPONSES, json=asked)).json()["id"]
    sequence = await claimed(head)
    sequence.output_ids = (*head.tokens.tokenizer.encode(SAID).ids, *head.tokens.eos_ids)
    head.finish(sequence)
    found: dict[str, Any] = (await http.get(f"{RESPONSES}/{response_id}")).json()
    return found


async def refused(
    http: httpx.AsyncClient, items: list[Any], headers: dict[str, str] | None = None
) -> dict[str, str]:
    """The error, which a count of the same input gives too."""
    body = json.dumps({"model": "clerk", "input": items})
    headers = {"content-type": "application/json", **(headers or {})}
    reply = await http.post(RESPONSES, content=body, headers=headers)
    counted = await http.post(f"{RESPONSES}/input_tokens", content=body, headers=headers)
    assert reply.status_code == counted.status_code == 400, reply.text
    error: dict[str, str] = reply.json()["error"]
    assert counted.json()["error"] == error
    return error


@pytest.mark.parametrize("is_typed", [True, False, None])
async def test_references_are_read_as_the_items_that_they_name(
    http: httpx.AsyncClient, head: TinyHead, is_typed: bool | None
) -> None:
    first = await with_calls(http, head)
    kinds = [item["type"] for item in first["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    named: list[Any] = [reference(item["id"]) for item in first["output"]]
    for each in named:
        if is_typed is None:
            each["type"] = None
        elif not is_typed:
            del each["type"]
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
        for item in first["output"][2:]
    ]
    before = [{"role": "user", "content": PROMPT}]
    body = {"model": "clerk", "tools": [ADD], "instructions": "Add."}
    with head.serving():
        ids = []
        for middle in (first["output"], named):
            items = [*before, *middle, *outputs, QUESTION]
            answer = await http.post(RESPONSES, json={**body, "input": items})
            assert answer.status_code == 200, answer.text
            ids.append(answer.json()["id"])
            counted = await http.post(f"{RESPONSES}/input_tokens", json={**body, "input": items})
            assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]
    written, referred = (stored(head, one) for one in ids)
    assert referred == written
    turn = referred.messages[2]
    assert (turn["reasoning"], turn["content"].strip(), len(turn["tool_calls"])) == (
        "hm",
        "Yes.",
        2,
    )
    # What was read stays when it is deleted where it came from
    await http.delete(f"{RESPONSES}/{first['id']}")
    listed = [(await http.get(f"{RESPONSES}/{one}/input_items")).json()["data"] for one in ids]
    shown = [[{**item, "id": None} for item in page] for page in listed]
    assert shown[0] == shown[1]
    assert shown[1][3]["type"] == "function_call"


async def test_openais_client_goes_on_by_references_alone(
    client: AsyncOpenAI, head: TinyHead
) -> None:
    with head.serving():
        logprobs: Any = ["message.output_text.logprobs"]
        first = await client.responses.create(**ASKED, include=logprobs, top_logprobs=2)
        (said,) = first.output
        assert said.id is not None
        (asked,) = (await client.responses.input_items.list(first.id)).data
        assert asked.id is not None
        items: Any = [reference(asked.id), reference(said.id)]
        second = await client.responses.create(model="clerk", input=items)
        key = {"Idempotency-Key": "again"}
        repeats = [
            await client.responses.create(model="clerk", input=items, extra_headers=key)
            for _ in range(2)
        ]
    messages = stored(head, second.id).messages
    assert [(one["role"], one["content"]) for one in messages] == [
        ("user", PROMPT),
        ("assistant", first.output_text),
    ]
    assert repeats[0].id == repeats[1].id


async def test_an_item_of_an_input_may_be_named_before_its_response_has_ended(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    told = [{"role": "system", "content": "Add."}, {"role": "user", "content": PROMPT}]
    waiting = await http.post(RESPONSES, json={**ASKED, "input": told, "background": True})
    job_id = waiting.json()["id"].removeprefix("resp_")
    items = [reference(f"msg_{job_id}_in{place}") for place in range(2)]
    body = {"model": "clerk", "input": items, "background": True}
    answer = await http.post(RESPONSES, json=body)
    read = stored(head, answer.json()["id"])
    assert read.messages == stored(head, waiting.json()["id"]).messages
    error = await refused(http, [QUESTION, reference(f"msg_{job_id}_0")])
    assert error["param"] == "input[1].id"
    assert "its response is queued. Wait for its end" in error["message"]
    error = await refused(http, [reference(f"msg_{job_id}_in2")])
    assert "not found" in error["message"]


async def test_what_is_not_there_for_a_caller_is_refused_by_its_place(
    http: httpx.AsyncClient, head: TinyHead, database_url: str
) -> None:
    with head.serving():
        replies = [
            (await http.post(RESPONSES, json={**ASKED, "store": store})).json()
            for store in (True, True, False)
        ]
    kept, deleted, hidden = (reply["output"][0]["id"] for reply in replies)
    await http.delete(f"{RESPONSES}/{replies[1]['id']}")
    unknown = [
        deleted,
        hidden,
        kept.removesuffix("_0") + "_1",
        kept.replace("msg_", "rs_"),
        kept.replace("_0", "_in9999999999"),
        kept.upper(),
        f"msg_{uuid4()}_0",
        f"msg_{'-' * 36}_0",
        replies[0]["id"],
        "msg_68f0c1",
        "",
        "é" * 5_000,
    ]
    for item_id in unknown:
        error = await refused(http, [QUESTION, reference(kept), reference(item_id)])
        assert error["param"] == "input[2].id", (item_id, error)
        assert "not found" in error["message"], error
    other = bearer(make_key(database_url, tenant="other"))
    theirs = await refused(http, [reference(kept)], headers=other)
    assert (theirs["param"], "not found" in theirs["message"]) == ("input[0].id", True)
    twice = await refused(http, [reference(kept), QUESTION, reference(kept)])
    assert twice["param"] == "input[2].id"
    assert twice["message"].startswith("input[2].id: duplicate item: input[0] has the id")
    # Neither a type nor an id alone
    assert (await refused(http, [{"id": kept, "status": "completed"}]))["param"] == "input[0].type"
    assert (await refused(http, [{"type": "item_reference"}]))["param"] == "input[0].id"


async def test_a_response_that_failed_has_no_items_to_name(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    failed = (await http.post(RESPONSES, json={**ASKED, "background": True})).json()
    head.end(await claimed(head), JobState.FAILED)
    item_id = f"msg_{failed['id'].removeprefix('resp_')}_0"
    error = await refused(http, [reference(item_id)])
    assert "its response is failed and has no output" in error["message"]


def test_a_call_whose_id_a_model_made_too_long_is_refused() -> None:
    call = CallItem(id="fc_1", status="completed", call_id="c" * 257, name="add", arguments="{}")
    with pytest.raises(Invalid, match=r"input\[3\]\.id: .* length <= 256"):
        as_sent(call, 3)


async def test_a_line_of_a_batch_may_refer_to_items(
    client: AsyncOpenAI, http: httpx.AsyncClient, head: TinyHead
) -> None:
    first = await with_calls(http, head)
    good = [*map(reference, [item["id"] for item in first["output"][:2]]), QUESTION]
    bad = [QUESTION, reference(f"msg_{uuid4()}_0")]
    bodies = [{"model": "clerk", "input": items} for items in (good, bad)]
    lines = [line(f"{place}", body, RESPONSES) for place, body in enumerate(bodies)]
    with head.serving():
        batch = await until(client, head, await begin(client, lines, RESPONSES), *ENDED)
    (answer,) = await lines_of(client, batch.output_file_id)
    messages = stored(head, answer["response"]["body"]["id"]).messages
    assert [one["role"] for one in messages] == ["assistant", "user"]
    assert messages[0]["reasoning"] == "hm"
    (failed,) = await lines_of(client, batch.error_file_id)
    assert "input[1].id: item with id" in json.dumps(failed)


async def test_many_references_are_read_at_once_and_not_without_end(
    http: httpx.AsyncClient, head: TinyHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [{"role": "user", "content": PROMPT}] * 1_000
    body = {"model": "clerk", "background": True}
    first = (await http.post(RESPONSES, json={**body, "input": told})).json()
    job_id = first["id"].removeprefix("resp_")
    items = [reference(f"msg_{job_id}_in{place}") for place in range(1_000)]
    numbers = []
    for some in (items[:1], items):
        with reads() as found:
            again = (await http.post(RESPONSES, json={**body, "input": some})).json()
        assert len(stored(head, again["id"]).input) == len(some)
        numbers.append(len(found))
    assert numbers[0] == numbers[1]
    strange = [reference(f"msg_{uuid4()}_0") for _ in range(MAX_RESPONSES + 1)]
    error = await refused(http, strange)
    assert error["param"] == "input"
    assert "lead to 257 responses, over the limit of 256" in error["message"]
    assert "not found" in (await refused(http, strange[1:]))["message"]
    with head.serving():
        said = (await http.post(RESPONSES, json=ASKED)).json()["output"]
    for name, number, one in (("BYTES", 4_096, items[0]), ("TOKENS", 2, reference(said[0]["id"]))):
        with monkeypatch.context() as patch:
            patch.setattr(response_rows, f"MAX_REFERENCED_{name}", number)
            error = await refused(http, [one])
        assert (error["param"], f"over {number}" in error["message"]) == ("input", True)
