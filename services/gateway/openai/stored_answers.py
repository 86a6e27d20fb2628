"""Stored completions as they were answered, from their rows. Knows no route."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec import UNSET
from msgspec.structs import asdict

from services.gateway.bodies import CompletionUsage
from services.gateway.context import Gateway
from services.gateway.http.event_loop import num_named_of, off_loop
from services.gateway.openai.bodies import (
    AnswerHead,
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
)
from services.gateway.openai.choice_answers import Answer, total_usage, whole_choices
from services.gateway.openai.completion_response import result_of
from services.gateway.openai.responses import ChatResponses
from services.gateway.openai.stored_bodies import MessageList, StoredChatCompletion, StoredMessage
from services.gateway.openai.system_fingerprint import fingerprint_of, system_fingerprint
from shardline.base.errors import Invalid
from shardline.contract.job import FinishReason, Job, address_of
from shardline.store.stored_completions import StoredCompletion
from shardline_server.tokenize import Tokens

PREFIX = "chatcmpl-"
UNKNOWN = "fp_unknown"
"""The fingerprint of a model that is not registered."""


async def stored_answer(gateway: Gateway, stored: StoredCompletion) -> StoredChatCompletion:
    """Rebuilds the whole answer. Once its model is not registered, or has a tokenizer that cannot
    be read, choices have the text as it was written, markers of calls included, and no
    log-probabilities."""
    first = stored.jobs[0]
    address = address_of(first.model, first.params.adapter)
    try:
        model = await gateway.catalog.get(address)
    except Invalid:
        model = None
    head = AnswerHead(
        id=f"{PREFIX}{first.id}",
        created=int(first.created_at.timestamp()),
        model=address,
        system_fingerprint=UNKNOWN if model is None else system_fingerprint(model),
        service_tier=stored.stored.get("service_tier", UNSET),
    )
    answer: Answer = as_written(head, stored.jobs)
    if model is not None:
        num_tokens = sum(num_named_of(job.result) for job in stored.jobs)
        builders = _builders(head, model.tokens, stored.jobs)
        work = partial(whole_choices, builders, stored.jobs, len(stored.jobs))
        answer = await off_loop(work, num_tokens)
    return StoredChatCompletion(**asdict(answer), metadata=first.metadata)


def _builders(head: AnswerHead, tokens: Tokens, jobs: Sequence[Job]) -> list[ChatResponses]:
    first = jobs[0]
    params = {**asdict(first.params), "logprobs": first.params.logprobs is not None}
    request = ChatCompletionRequest(model=first.model, messages=(), **params)
    return [
        ChatResponses(
            head=head,
            request=request,
            tokens=tokens,
            prompt_ids=job.prompt_token_ids or (),
            job_id=job.id,
            index=index,
        )
        for index, job in enumerate(jobs)
    ]


def as_written(head: AnswerHead, jobs: Sequence[Job]) -> ChatCompletion:
    """The answer as far as rows alone have it."""
    results = [result_of(job) for job in jobs]
    choices = [
        ChatChoice(
            index=index,
            finish_reason="length" if result.finish_reason is FinishReason.LENGTH else "stop",
            message=AssistantMessage(role="assistant", content=result.text, refusal=None),
            logprobs=None,
        )
        for index, result in enumerate(results)
    ]
    usage = CompletionUsage.of(total_usage([result.usage for result in results], len(jobs)))
    fingerprint = fingerprint_of(results[0]) or head.system_fingerprint
    fields = {**asdict(head), "system_fingerprint": fingerprint}
    return ChatCompletion(**fields, choices=choices, usage=usage)


def message_page(
    stored: StoredCompletion, *, limit: int, after: str | None, is_ascending: bool
) -> MessageList:
    """Returns some of the messages that were asked with. Raises Invalid for an `after` that is none
    of theirs."""
    messages = _messages(stored)
    if not is_ascending:
        messages.reverse()
    if after is not None:
        places = [place for place, message in enumerate(messages) if message.id == after]
        if not places:
            raise Invalid("after", "no message has this id", "Send last_id of the page before")
        messages = messages[places[0] + 1 :]
    page: Sequence[StoredMessage] = messages[:limit]
    return MessageList(
        data=list(page),
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(messages) > limit,
    )


def _messages(stored: StoredCompletion) -> list[StoredMessage]:
    name = f"{PREFIX}{stored.jobs[0].id}"
    return [
        msgspec.convert({"content": None, **message, "id": f"{name}-{place}"}, StoredMessage)
        for place, message in enumerate(stored.messages)
    ]
