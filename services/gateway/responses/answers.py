"""Rows as OpenAI's response documents. Knows no transport."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

import msgspec

from services.gateway.openai.responses import LogprobTexts
from services.gateway.openai.service_tier import tier_used
from services.gateway.responses.documents import (
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    ResponseDocument,
    ResponseError,
    ResponseUsage,
    Status,
)
from services.gateway.responses.output import ResponseOutput, ToolNames
from services.gateway.responses.output_items import ItemStatus, OutputItem
from services.gateway.responses.request_fields import KeptOptions
from services.gateway.responses.tools import flat_choice, flat_tools
from shardline.contract.job import MAX_TOKENS, FinishReason, Job, JobState, Usage, address_of
from shardline.store.responses import ResponseRow
from shardline_server.tokenize import Tokens

PREFIX = "resp_"


def response_id(job_id: UUID) -> str:
    """The response of a job, as clients name it."""
    return f"{PREFIX}{job_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseAnswers:
    """Builds every answer and event of one response from its row."""

    row: ResponseRow
    tokens: Tokens

    @property
    def job(self) -> Job:
        """The job of the response."""
        return self.row.job

    @property
    def options(self) -> KeptOptions:
        """Returns the options that the job lacks. A later release may have written more."""
        return msgspec.convert(self.row.options, KeptOptions)

    def output(self, first_number: int = 0) -> ResponseOutput:
        """The output's items and events, before its first token."""
        params = self.job.params
        prompt_ids = self.job.prompt_token_ids or ()
        has_logprobs = params.logprobs is not None
        return ResponseOutput(
            self.job.id,
            # Without the room that the job had: the text is cut where its last token is.
            completion=self.tokens.completion(params, MAX_TOKENS, prompt_ids),
            replies=self.tokens.chat.parser(params, self.job.id, prompt_ids),
            with_reasoning=params.include_reasoning,
            logprob_texts=LogprobTexts(self.tokens.token_texts(params, prompt_ids))
            if has_logprobs
            else None,
            tools=ToolNames(
                namespaces=self.options.namespaces, custom=self.options.custom_formats.keys()
            ),
            first_number=first_number,
        )

    def whole(self) -> ResponseDocument:
        """The response as its row has it: with its output if it has a result."""
        result = self.job.result
        if result is None:
            return self.document()
        output = self.output()
        output.push(result.token_ids, result.logprobs)
        output.end(self.item_status)
        return self.document(output)

    @property
    def item_status(self) -> ItemStatus:
        """The status of the last item of an ended response."""
        result = self.job.result
        is_whole = result is not None and result.finish_reason is FinishReason.STOP
        return "completed" if is_whole else "incomplete"

    def at(self, status: Status) -> ResponseDocument:
        """The response as it was before it ended."""
        return self._document(status=status)

    def document(self, output: ResponseOutput | None = None) -> ResponseDocument:
        """The response as it is, with an output that has ended."""
        job = self.job
        status = _status(job)
        usage = None
        if job.result is not None and output is not None:
            usage = _usage(job.result.usage)
        completed_at = None if job.finished_at is None else int(job.finished_at.timestamp())
        is_cut = status == "incomplete"
        return self._document(
            status=status,
            completed_at=completed_at,
            output=[] if output is None else output.items,
            usage=usage,
            error=_error(job) if status == "failed" else None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
        )

    def _document(
        self,
        *,
        status: Status,
        completed_at: int | None = None,
        output: list[OutputItem] | None = None,
        usage: ResponseUsage | None = None,
        error: ResponseError | None = None,
        incomplete_details: IncompleteDetails | None = None,
    ) -> ResponseDocument:
        job = self.job
        params = job.params
        options = self.options
        previous = self.row.previous_id
        return ResponseDocument(
            id=response_id(job.id),
            created_at=int(job.created_at.timestamp()),
            completed_at=completed_at,
            status=status,
            background=options.background,
            error=error,
            incomplete_details=incomplete_details,
            instructions=self.row.instructions,
            max_output_tokens=params.max_tokens,
            max_tool_calls=options.max_tool_calls,
            model=address_of(job.model, params.adapter),
            output=output or [],
            parallel_tool_calls=params.parallel_tool_calls,
            previous_response_id=None if previous is None else response_id(previous),
            prompt_cache_key=options.prompt_cache_key,
            reasoning=options.reasoning,
            safety_identifier=options.safety_identifier,
            service_tier=tier_used(options.service_tier),
            store=options.store,
            temperature=params.temperature,
            top_p=params.top_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            text=options.text,
            tool_choice=flat_choice(params.tool_choice, options.custom_formats),
            tools=flat_tools(
                params.tools, options.namespaces, options.descriptions, options.custom_formats
            ),
            top_logprobs=options.top_logprobs,
            truncation=options.truncation,
            usage=usage,
            user=options.user,
            metadata=job.metadata,
        )


def _status(job: Job) -> Status:
    if job.state is JobState.SUCCEEDED:
        is_cut = job.result is not None and job.result.finish_reason is FinishReason.LENGTH
        return "incomplete" if is_cut else "completed"
    return STATUSES[job.state]


STATUSES: dict[JobState, Status] = {
    JobState.QUEUED: "queued",
    JobState.RUNNING: "in_progress",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
    # OpenAI's responses have no deadline, and no status for one.
    JobState.EXPIRED: "failed",
}


def _error(job: Job) -> ResponseError:
    reason = job.error or {}
    if job.state is JobState.EXPIRED:
        problem = "its deadline passed before it was done"
        return ResponseError(code="server_error", message=problem)
    words = [
        str(reason[name]) for name in ("field", "problem", "remedy", "message") if reason.get(name)
    ]
    is_callers = reason.get("code") == "invalid_request"
    return ResponseError(
        code="invalid_prompt" if is_callers else "server_error",
        message=": ".join(words) or "no reason was recorded",
    )


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=usage.cached_tokens or 0),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(reasoning_tokens=usage.reasoning_tokens or 0),
        total_tokens=usage.total_tokens,
    )
