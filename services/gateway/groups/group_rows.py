"""The rows of one request that stands for several jobs, tokenized together within one limit. Knows
no route."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from msgspec.structs import replace

from shardline.base.errors import Invalid
from shardline.contract.job import JobRequest
from shardline.store.inserts import EncodedRequest, Tokenized, encode_choices
from shardline_server.tokenize import RegisteredModel

MAX_PROMPT_TOKENS = 1 << 20
"""Of all jobs of a request: each row has its whole prompt."""


def encoded_group(
    model: RegisteredModel,
    jobs: Iterable[tuple[AbstractContextManager[None], JobRequest]],
    too_many_tokens: Callable[[int], Invalid],
) -> EncodedRequest:
    """Returns the rows of jobs, each with the names of its fields in errors. Raises Invalid, and
    what `too_many_tokens` makes of the number of jobs that are over MAX_PROMPT_TOKENS together."""
    rows: list[JobRequest] = []
    tokenized: list[Tokenized] = []
    num_tokens = 0
    for naming, job in jobs:
        with naming:
            prepared = model.tokens.prepare(
                prompt=job.prompt, messages=job.messages, params=job.params()
            )
        num_tokens += len(prepared.prompt_ids)
        rows.append(replace(job, model=model.name, adapter=model.adapter))
        tokenized.append((prepared.prompt_ids, prepared.max_tokens))
        if num_tokens > MAX_PROMPT_TOKENS:
            raise too_many_tokens(len(rows))
    return encode_choices(rows, tokenized)
