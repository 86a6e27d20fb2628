"""Stored completions as they were answered, from their rows. Knows no route."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET
from msgspec.structs import asdict

from services.gateway.catalog import system_fingerprint
from services.gateway.context import Gateway
from services.gateway.openai.bodies import AnswerHead, ChatCompletionRequest
from services.gateway.openai.choice_answers import whole_choices
from services.gateway.openai.responses import ChatResponses
from services.gateway.openai.stored_bodies import MessageList, StoredChatCompletion, StoredMessage
from shardline.base.errors import Invalid
from shardline.contract.job import address_of
from shardline.store.stored_completions import StoredCompletion

PREFIX = "chatcmpl-"


async def stored_answer(gateway: Gateway, stored: StoredCompletion) -> StoredChatCompletion:
    """Rebuilds the whole answer. Raises UnknownModel where its model is registered no more."""
    first = stored.jobs[0]
    model = await gateway.catalog.get(address_of(first.model, first.params.adapter))
    params = {**asdict(first.params), "logprobs": first.params.logprobs is not None}
    request = ChatCompletionRequest(model=first.model, messages=(), **params)
    head = AnswerHead(
        id=f"{PREFIX}{first.id}",
        created=int(first.created_at.timestamp()),
        model=model.address,
        system_fingerprint=system_fingerprint(model),
        service_tier=stored.stored.get("service_tier", UNSET),
    )
    builders = [
        ChatResponses(
            head=head,
            request=request,
            tokens=model.tokens,
            prompt_ids=job.prompt_token_ids or (),
            job_id=job.id,
            index=index,
        )
        for index, job in enumerate(stored.jobs)
    ]
    answer = whole_choices(builders, stored.jobs, len(stored.jobs))
    return StoredChatCompletion(**asdict(answer), metadata=first.metadata)


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
