"""Claimed rows as the engine's requests, with the model's finish rules. Knows neither Postgres nor Celery."""

from __future__ import annotations

import msgspec
from tokenizers import Tokenizer

from services.stage.model.peft import AdapterFolder
from services.stage.scheduling.sequence import Request
from shardline.errors import Invalid
from shardline.store.claims import Claimed
from shardline.tokenize import CompletionText, Vocabulary


class EngineRequests:
    """Of one model: its tokenizer, its end-of-sequence ids and its adapters."""

    def __init__(
        self, *, tokenizer: Tokenizer, eos_ids: tuple[int, ...], context_length: int, adapters: AdapterFolder
    ) -> None:
        self._vocabulary = Vocabulary(tokenizer, eos_ids)
        self._context_length = context_length
        self.adapters = adapters

    def build(self, row: Claimed) -> tuple[Request, CompletionText]:
        """The request to schedule and the sink of its tokens. A job that crashed an engine before is quarantined; one
        whose adapter cannot serve here is refused by the scheduler."""
        params = msgspec.structs.replace(row.params, max_tokens=row.max_tokens, seed=row.seed)
        adapter, refusal = self._adapter(row)
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
            adapter=adapter,
            refusal=refusal,
        )
        room = self._context_length - len(row.prompt_ids)
        return request, CompletionText(self._vocabulary, params, room=room, prompt_ids=row.prompt_ids)

    def _adapter(self, row: Claimed) -> tuple[str, str]:
        """The fingerprint of its adapter, or why there is none. The claim's counts: files that changed since then are
        refused when they are loaded."""
        name = row.params.adapter
        try:
            return "" if name is None else row.adapter or self.adapters.get(name).fingerprint, ""
        except Invalid as error:
            return "", f"{error.problem}. {error.remedy}"
