"""Prompts as a model reads them, over real HTTP: vLLM's and llama.cpp's routes, and the version."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from shardline import __version__
from shardline.store import models
from tests.integration.gateway.running_gateway import PROMPT
from tests.tiny_head import TinyHead, clerk_row

CHAT = [{"role": "user", "content": PROMPT}]


async def test_tokens_of_a_prompt_are_those_of_its_job_and_its_text(
    http: httpx.AsyncClient,
) -> None:
    job_id = (await http.post("/v1/jobs", json={"model": "clerk", "prompt": PROMPT})).json()["id"]
    ids = (await http.get(f"/v1/jobs/{job_id}")).json()["prompt_token_ids"]
    found = await http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True})
    body = found.json()
    assert (body["tokens"], body["count"], body["max_model_len"]) == (ids, len(ids), 512)
    assert len(body["token_strs"]) == len(ids)
    bare = await http.post("/tokenize", json={"prompt": PROMPT, "add_special_tokens": False})
    assert bare.json()["tokens"] == ids[1:]
    assert bare.json()["token_strs"] is None
    text = await http.post("/detokenize", json={"tokens": ids[1:], "model": "clerk"})
    assert text.json() == {"prompt": PROMPT}


async def test_messages_are_rendered_and_tokenized_as_those_of_a_job(
    http: httpx.AsyncClient,
) -> None:
    job_id = (await http.post("/v1/jobs", json={"model": "clerk", "messages": CHAT})).json()["id"]
    ids = (await http.get(f"/v1/jobs/{job_id}")).json()["prompt_token_ids"]
    assert (await http.post("/tokenize", json={"messages": CHAT})).json()["tokens"] == ids
    text = (await http.post("/apply-template", json={"messages": CHAT})).json()["prompt"]
    plain = {"prompt": text, "add_special_tokens": False}
    assert (await http.post("/tokenize", json=plain)).json()["tokens"] == ids


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": CHAT, "add_generation_prompt": False},
        {
            "messages": [*CHAT, {"role": "assistant", "content": "words: 1"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ],
)
async def test_the_end_of_messages_is_rendered_as_that_of_a_job(
    http: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    job = await http.post("/v1/jobs", json={"model": "clerk", **fields})
    ids = (await http.get(f"/v1/jobs/{job.json()['id']}")).json()["prompt_token_ids"]
    assert (await http.post("/tokenize", json=fields)).json()["tokens"] == ids
    text = (await http.post("/apply-template", json=fields)).json()["prompt"]
    plain = {"prompt": text, "add_special_tokens": False}
    assert (await http.post("/tokenize", json=plain)).json()["tokens"] == ids


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a" * 200_000}, "prompt"),
        ("/tokenize", {"content": "a"}, "content"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {"tokens": [5, 896]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
        ("/apply-template", {"messages": []}, "messages"),
    ],
)
async def test_a_wrong_question_is_refused_by_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], named: str
) -> None:
    reply = await http.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, named)


async def test_the_model_is_named_once_there_are_several(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    with head.database.begin() as connection:
        models.register_model(connection, {**clerk_row(), "name": "org/other"})
    unnamed = await http.post("/tokenize", json={"prompt": "a"})
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
    named = await http.post("/tokenize", json={"prompt": "a", "model": "org/other"})
    assert named.status_code == 200
    # The description has no name for a path of several parts, so a client that is held to none.
    async with httpx.AsyncClient(base_url=http.base_url, headers=http.headers) as plain:
        assert (await plain.get("/v1/models/org/other")).json()["id"] == "org/other"
    absent = await http.post("/tokenize", json={"prompt": "a", "model": "absent"})
    assert (absent.status_code, absent.json()["error"]["code"]) == (404, "model_not_found")


async def test_the_version_is_told(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": __version__}
