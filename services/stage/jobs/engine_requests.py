"""Claimed rows as the engine's requests, with the model's finish rules. Knows neither Postgres nor
Celery."""

from __future__ import annotations

from itertools import chain

import msgspec
from tokenizers import Tokenizer

from services.stage.adapters.peft import AdapterFolder
from services.stage.jobs.attempt_spans import AttemptSpans
from shardline.base.errors import Invalid
from shardline.store.claims import ClaimedJob
from shardline.tokenize import CompletionText, Vocabulary
from shardline_scheduler.sequence import Request


class EngineRequests:
    """Builds the requests of one model by its tokenizer, end-of-sequence ids, limits and
    adapters."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        eos_ids: tuple[int, ...],
        context_length: int,
        vocab_size: int,
        adapters: AdapterFolder,
        spans: AttemptSpans,
    ) -> None:
        self._vocabulary = Vocabulary(tokenizer, eos_ids)
        self._context_length = context_length
        self._vocab_size = vocab_size
        self.adapters = adapters
        self._spans = spans

    def build(self, row: ClaimedJob) -> tuple[Request, CompletionText]:
        """Returns the request to schedule and the sink of its tokens. A job that crashed an engine
        before is quarantined; one with an adapter or ids that cannot serve here is refused by the
        scheduler."""
        params = msgspec.structs.replace(row.params, max_tokens=row.max_tokens, seed=row.seed)
        adapter, refusal = self._adapter(row)
        request = Request(
            key=(str(row.job_id), row.fence),
            prompt_ids=row.prompt_ids,
            # Stages need nothing of what decides texts alone.
            params=msgspec.structs.replace(
                params, chat_template_kwargs={}, skip_special_tokens=True
            ),
            seed=row.seed,
            output_ids=row.output_ids,
            output_logprobs=row.logprobs or (),
            priority=row.priority,
            quarantined=row.crashes > 0,
            parked=row.parked,
            tenant=row.tenant_id,
            adapter=adapter,
            trace=self._spans.traceparent(row),
            refusal=refusal or self._foreign_id(row),
        )
        room = self._context_length - len(row.prompt_ids)
        return request, CompletionText(
            self._vocabulary, params, room=room, prompt_ids=row.prompt_ids
        )

    def _foreign_id(self, row: ClaimedJob) -> str:
        """Why its ids are none of the model's, if so. Doors check them, but a row can be written by
        hand, or be prepared for other weights of this name; such an id would end everybody's
        epoch."""
        for token_id in chain(row.prompt_ids, row.output_ids):
            if token_id is None or not 0 <= token_id < self._vocab_size:
                return (
                    f"token id {token_id} is not in the vocabulary of {self._vocab_size}. "
                    "Submit the job again"
                )
        return ""

    def _adapter(self, row: ClaimedJob) -> tuple[str, str]:
        """The fingerprint of its adapter, or why there is none. The claim's counts: files that
        changed since then are refused when they are loaded."""
        name = row.params.adapter
        try:
            return "" if name is None else row.adapter or self.adapters.get(name).fingerprint, ""
        except Invalid as error:
            return "", f"{error.problem}. {error.remedy}"
