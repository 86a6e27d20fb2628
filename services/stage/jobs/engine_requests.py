"""Claimed rows as the engine's requests, with the model's finish rules. Knows neither Postgres nor Celery."""

from __future__ import annotations

import msgspec
from tokenizers import Tokenizer

from services.stage.scheduling.sequence import Request
from shardline.store.claims import Claimed
from shardline.tokenize import CompletionText, Vocabulary


class EngineRequests:
    """Of one model: its tokenizer and its end-of-sequence ids."""

    def __init__(self, *, tokenizer: Tokenizer, eos_ids: tuple[int, ...], context_length: int) -> None:
        self._vocabulary = Vocabulary(tokenizer, eos_ids)
        self._context_length = context_length

    def build(self, row: Claimed) -> tuple[Request, CompletionText]:
        """The request to schedule and the sink of its tokens. A job that crashed an engine before is quarantined."""
        params = msgspec.structs.replace(row.params, max_tokens=row.max_tokens, seed=row.seed)
        request = Request(
            key=(str(row.job_id), row.fence),
            prompt_ids=row.prompt_ids,
            params=params,
            seed=row.seed,
            output_ids=row.output_ids,
            output_logprobs=row.logprobs or (),
            priority=row.priority,
            quarantined=row.crashes > 0,
            parked=row.parked,
            tenant=row.tenant_id,
        )
        return request, CompletionText(self._vocabulary, params, room=self._context_length - len(row.prompt_ids))
