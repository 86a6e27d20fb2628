"""Log-probabilities in OpenAI's shapes: texts, bytes and places of tokens, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from tokenizers import Tokenizer

from services.gateway.openai.bodies import AnswerHead, ChatCompletionRequest, CompletionRequest
from services.gateway.openai.reply_reader import NOTHING
from services.gateway.openai.responses import ChatResponses, CompletionResponses
from shardline.contract.job import FinishReason, JobState, Result, TokenLogprob, Usage
from shardline.contract.wire import Delta
from shardline_server.tokenize import Tokens
from tests.unit.tokenize.small_tokenizers import byte_fallback, byte_level, id_of

JOB_ID = uuid4()
HEAD = AnswerHead(id="cmpl-1", model="m", created=0, system_fingerprint="fp")


def tokens_of(tokenizer: Tokenizer) -> Tokens:
    """Of a model with this tokenizer."""
    return Tokens(
        model="m",
        tokenizer_json=tokenizer.to_str(),
        chat_template=None,
        special_tokens={},
        context_length=4096,
        vocab_size=tokenizer.get_vocab_size(),
        eos_ids=(),
    )


def completions(tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> CompletionResponses:
    request = CompletionRequest(model="m", prompt="")
    tokens = tokens_of(tokenizer)
    return CompletionResponses(
        head=HEAD, request=request, tokens=tokens, prompt_ids=tuple(prompt_ids), job_id=JOB_ID
    )


def shown(answer: msgspec.Struct) -> Any:
    """The log-probabilities of an answer or a chunk, as its caller reads them."""
    return msgspec.to_builtins(answer)["choices"][0]["logprobs"]


def logprobs_of(ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """Each token with itself as the second best."""
    return tuple(
        TokenLogprob(token_id, -0.5, ((1 + 0xF0, -0.1), (token_id, -0.5))) for token_id in ids
    )


def result(ids: Sequence[int]) -> Result:
    usage = Usage(prompt_tokens=1, completion_tokens=len(ids))
    return Result(
        job_id=uuid4(),
        text="",
        token_ids=tuple(ids),
        usage=usage,
        finish_reason=FinishReason.LENGTH,
        exact=True,
        logprobs=logprobs_of(ids),
    )


@pytest.mark.parametrize("num_begun", [0, 1, 3], ids=["whole", "begun", "cut at its last byte"])
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_a_stream_places_its_tokens_as_the_whole_answer_does(size: int, num_begun: int) -> None:
    tokenizer = byte_fallback()
    hello = id_of(tokenizer, "▁hello")
    world = id_of(tokenizer, "▁world")
    last = "😀".encode()[:num_begun]
    ids = [
        world,
        *(1 + byte for byte in "😀é!".encode()),
        hello,
        world,
        *(1 + byte for byte in last),
    ]
    answers = completions(tokenizer, [hello])
    texts = answers.logprob_texts()
    deltas = [
        Delta(fence=1, start=start, ids=tuple(part), text="held back", logprobs=logprobs_of(part))
        for start in range(0, len(ids), size)
        for part in [ids[start : start + size]]
    ]
    end = Delta(
        fence=1, start=len(ids), state=JobState.SUCCEEDED, finish_reason=FinishReason.LENGTH
    )

    chunks = [shown(answers.chunk(delta, texts, NOTHING)) for delta in deltas]
    chunks += [shown(answers.chunk(end, texts, NOTHING))] if texts.new(end) is not None else []

    whole = shown(answers.whole(result(ids)))
    assert "".join(whole["tokens"]) == " world😀é! hello world" + "\ufffd" * num_begun
    assert whole["text_offset"] == [0, 6, 6, 6, 6, 7, 7, 8, 9, 15, *[21] * num_begun]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [value for chunk in chunks for value in chunk[name]] == whole[name]


def test_bytes_of_a_chats_tokens_are_its_texts() -> None:
    ids = [1 + byte for byte in "😀é".encode()]

    request = ChatCompletionRequest(model="m", messages=())
    tokens = tokens_of(byte_fallback())
    answers = ChatResponses(head=HEAD, request=request, tokens=tokens, prompt_ids=(), job_id=JOB_ID)
    content = shown(answers.whole(result(ids)))["content"]

    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "😀é"
    assert [token["token"] for token in content] == ["", "", "", "😀", "", "é"]
    assert content[3]["top_logprobs"] == [
        {"token": "\ufffd", "logprob": -0.1, "bytes": [0xF0]},
        {"token": "😀", "logprob": -0.5, "bytes": [0x80]},
    ]


def test_alternatives_of_a_completion_have_a_key_each_and_the_output_token_is_one() -> None:
    tokenizer = byte_fallback()
    names = ("▁true", "true", "<0xF0>", "<0x9F>", "<0x41>", "lo")
    space, plain, *rest = (id_of(tokenizer, name) for name in names)
    top = tuple((token_id, -1.0) for token_id in (space, *rest, 1 + 0x41))
    answers = completions(tokenizer, [space])
    delta = Delta(
        fence=1, start=0, ids=(plain,), text="", logprobs=(TokenLogprob(plain, -3.0, top[:-1]),)
    )

    (found,) = shown(answers.chunk(delta, answers.logprob_texts(), NOTHING))["top_logprobs"]

    assert list(found) == [" true", "bytes:\\xf0", "bytes:\\x9f", "A", "lo", "true"]
    assert found["true"] == -3.0


def test_an_alternative_with_the_text_of_another_token_is_named_by_its_id() -> None:
    tokenizer = byte_fallback()
    tokenizer.add_tokens(["A"])
    letter = id_of(tokenizer, "A")
    byte = id_of(tokenizer, "<0x41>")
    answers = completions(tokenizer)
    delta = Delta(
        fence=1,
        start=0,
        ids=(letter,),
        logprobs=(TokenLogprob(letter, -3.0, ((byte, -1.0), (letter, -3.0))),),
    )

    (found,) = shown(answers.chunk(delta, answers.logprob_texts(), NOTHING))["top_logprobs"]

    assert found == {f"token_id:{byte}": -1.0, "A": -3.0}


@pytest.mark.parametrize(
    ("prompt", "fields", "text"),
    [
        ("ab", {}, ""),
        ("ab", {"echo": True}, "ab"),
        ("xab", {"echo": True, "truncate_prompt_tokens": 2}, "ab"),
        ((), {"echo": True}, "ab"),
    ],
)
def test_an_echoed_prompt_begins_the_text_whole_and_streamed(
    prompt: str | tuple[int, ...], fields: dict[str, Any], text: str
) -> None:
    tokenizer = byte_level()
    ids = (id_of(tokenizer, "a"), id_of(tokenizer, "b"))
    responses = CompletionResponses(
        head=HEAD,
        request=CompletionRequest(model="m", prompt=prompt or ids, **fields),
        tokens=tokens_of(tokenizer),
        prompt_ids=ids,
        job_id=JOB_ID,
    )

    whole = msgspec.to_builtins(responses.whole(msgspec.structs.replace(result(()), text="c")))
    opening = msgspec.to_builtins(responses.opening_chunk())

    assert whole["choices"][0]["text"] == f"{text}c"
    assert (opening["choices"][0]["text"] if opening else "") == text
