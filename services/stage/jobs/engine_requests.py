"""Claimed rows as the engine's requests, with the model's finish rules. Knows neither Postgres nor
Celery."""

from __future__ import annotations

from itertools import chain

import msgspec

from services.stage.adapters.peft import AdapterFolder
from services.stage.jobs.attempt_spans import AttemptSpans
from services.stage.jobs.chat_replies import ChatReplies
from shardline.base.errors import Invalid
from shardline.contract.job import SamplingParams
from shardline.contract.request_parsing import check_prompt_logprobs
from shardline_scheduler.sequence import Request
from shardline_server.store.claims import ClaimedJob
from shardline_server.tokenize import CompletionText, Tokens
from shardline_server.tokenize.bad_words import BannedIds, banned_ids

OF_TEXTS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "bad_words",
        "chat_template_kwargs",
        "continue_final_message",
        "document",
        "include_reasoning",
        "include_stop_str_in_output",
        "parallel_tool_calls",
        "prompt_name",
        "question",
        "reasoning_effort",
        "skip_special_tokens",
        "thinking_token_budget",
        "tool_choice",
        "tools",
        "truncate_prompt_tokens",
    }
)
"""Parameters that no stage needs: they decide a prompt's ids and a text alone, or are ids by
now."""

OF_SAMPLING = tuple(name for name in SamplingParams.__struct_fields__ if name not in OF_TEXTS)


class EngineRequests:
    """Builds the requests of one model by its tokenizer, limits and adapters. `replies` reads what
    came of them."""

    def __init__(self, *, tokens: Tokens, adapters: AdapterFolder, spans: AttemptSpans) -> None:
        self._tokens = tokens
        self.replies = ChatReplies(tokens)
        self.adapters = adapters
        self._spans = spans

    def build(self, row: ClaimedJob) -> tuple[Request, CompletionText]:
        """Returns the request to schedule and the sink of its tokens. A job that crashed an engine
        before is quarantined; one with an adapter or ids that cannot serve here is refused by the
        scheduler."""
        params = msgspec.structs.replace(row.params, max_tokens=row.max_tokens, seed=row.seed)
        adapter, refusal = self._adapter(row)
        held, cannot = self._held(row)
        banned, ban_refusal = self._banned(row)
        labels, unasked = self._label_ids(row)
        refusals = (refusal, cannot, ban_refusal, unasked, _unscored(row))
        request = Request(
            key=(str(row.job_id), row.fence),
            prompt_ids=row.prompt_ids,
            params=held,
            seed=row.seed,
            output_ids=row.output_ids,
            output_logprobs=row.logprobs or (),
            priority=row.priority,
            quarantined=row.crashes > 0,
            parked=row.parked,
            tenant=row.tenant_id,
            adapter=adapter,
            trace=self._spans.traceparent(row),
            banned=banned,
            labels=labels,
            refusal=next(filter(None, refusals), "") or self._foreign_id(row),
        )
        room = self._tokens.context_length - len(row.prompt_ids)
        return request, self._tokens.completion(params, room, row.prompt_ids)

    def _held(self, row: ClaimedJob) -> tuple[SamplingParams, str]:
        """The parameters for the stages, which need nothing of what decides texts alone: of tools
        the grammar of the calls that must be made. Or why there are none."""
        output = row.params.structured_outputs
        refusal = ""
        if row.is_chat and row.params.question is None:
            try:
                output = self._tokens.chat.output_of(row.params, row.prompt_ids)
            except Invalid as error:
                refusal = str(error)
        held = {name: getattr(row.params, name) for name in OF_SAMPLING}
        if row.params.question is not None:
            # Those of its labels are its answer.
            held["logprobs"] = 0
        sampled = SamplingParams(**held)
        return msgspec.structs.replace(
            sampled, max_tokens=row.max_tokens, seed=row.seed, structured_outputs=output
        ), refusal

    def _foreign_id(self, row: ClaimedJob) -> str:
        """Why its ids are none of the model's, if so. Doors check them, but a row can be written by
        hand, or be prepared for other weights of this name; such an id would end everybody's
        epoch."""
        asked = (*row.params.logit_bias, *(row.params.allowed_token_ids or ()))
        for token_id in chain(row.prompt_ids, row.output_ids, asked):
            if token_id is None or not 0 <= token_id < self._tokens.vocab_size:
                return (
                    f"token id {token_id} is not in the vocabulary of {self._tokens.vocab_size}. "
                    "Submit the job again"
                )
        return ""

    def _banned(self, row: ClaimedJob) -> tuple[BannedIds, str]:
        """The sequences of tokens that its bad words make, or why there are none."""
        words = row.params.bad_words
        try:
            return banned_ids(self._tokens.tokenizer, words, vocab_size=self._tokens.vocab_size), ""
        except Invalid as error:
            return (), f"{error.field}: {error.problem}. {error.remedy}"

    def _label_ids(self, row: ClaimedJob) -> tuple[tuple[int, ...], str]:
        """The tokens of its question's options, or why there are none."""
        question = row.params.question
        try:
            labels = () if question is None else self._tokens.question_labels.of(question)
            return tuple(label.token_id for label in labels), ""
        except Invalid as error:
            return (), f"{error}"

    def _adapter(self, row: ClaimedJob) -> tuple[str, str]:
        """The fingerprint of its adapter, or why there is none. The claim's counts: files that
        changed since then are refused when they are loaded."""
        name = row.params.adapter
        try:
            return "" if name is None else row.adapter or self.adapters.get(name).fingerprint, ""
        except Invalid as error:
            return "", f"{error.problem}. {error.remedy}"


def _unscored(row: ClaimedJob) -> str:
    """Why its prompt's log-probabilities are too many, if they are: a row may be written by
    hand."""
    try:
        check_prompt_logprobs(row.params, len(row.prompt_ids))
    except Invalid as error:
        return f"{error}"
    return ""
