"""A body as the requests that it stands for: each prompt `n` times. Knows no server."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from services.gateway.http.json_body import Document
from services.gateway.openai.bodies import ChatCompletionRequest, CompletionRequest
from services.gateway.openai.requests import chat_request, completion_request
from shardline.base.errors import Invalid
from shardline.contract.choices import MAX_CHOICES, choices_of
from shardline.contract.ids import new_id
from shardline.contract.job import Prompt
from shardline.contract.request_parsing import invalid_from


def completion_choices(document: Document) -> tuple[CompletionRequest, ...]:
    """Parse the body of `POST /v1/completions`: prompt after prompt, each `n` times. The
    first one has the request's id and key, all have its seed or, after the first of a prompt, one
    that follows from it. Raises Invalid."""
    prompts = _prompts(document.get("prompt"))
    first = completion_request({**document, "prompt": prompts[0]})
    if len(prompts) * first.n > MAX_CHOICES:
        problem = f"{len(prompts)} prompts times n={first.n} are over {MAX_CHOICES} choices"
        raise Invalid("prompt", problem, "Send them in several requests")
    requests = [first]
    for place, prompt in enumerate(prompts[1:], 1):
        further = replace(first, prompt=_prompt(prompt, place), id=new_id(), idempotency_key=None)
        requests.append(further)
    return tuple(choice for request in requests for choice in choices_of(request, first.n))


def chat_choices(document: Document) -> tuple[ChatCompletionRequest, ...]:
    """Parse the body of `POST /v1/chat/completions`, `n` times. Raises Invalid."""
    request = chat_request(document)
    return choices_of(request, request.n)


def _prompts(prompt: Any) -> list[Any]:
    """Takes a list of texts or of token ids apart; all else is one prompt, right or wrong."""
    is_several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    if not is_several:
        return [prompt]
    if len(prompt) > MAX_CHOICES:
        problem = f"it holds {len(prompt)} prompts; {MAX_CHOICES} is the limit"
        raise Invalid("prompt", problem, "Send them in several requests")
    return list(prompt)


def _prompt(prompt: Any, place: int) -> Prompt:
    try:
        found: Prompt = msgspec.convert(prompt, Prompt)
    except msgspec.ValidationError as error:
        invalid = invalid_from(error)
        field = "" if invalid.field == "request" else invalid.field
        raise Invalid(f"prompt[{place}]{field}", invalid.problem, invalid.remedy) from error
    if len(found) == 0:
        raise Invalid(f"prompt[{place}]", "it is empty", "Send some text or token ids")
    return found
