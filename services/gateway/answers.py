"""Completions in OpenAI's shapes: whole, in chunks, with log-probabilities. Knows no transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from services.gateway.bodies import (
    AnswerHead,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionUsage,
    ContentLogprob,
    JobDocument,
    JobHead,
    JobListed,
    JobResult,
    NamedLogprob,
    TextLogprobs,
    TokenFields,
)
from services.gateway.openai import Wanted
from shardline.job import Job, JobSummary, Result, TokenLogprob, Usage
from shardline.tokenise import Tokens
from shardline.wire import Delta

BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the two doors call their things, and what every answer of one request repeats."""

    is_chat: bool
    public_id: str
    model: str
    created: int
    system_fingerprint: str
    wanted: Wanted
    tokens: Tokens
    prompt_ids: tuple[int, ...]

    def whole(self, result: Result) -> Completion | ChatCompletion:
        """The answer to a request that does not stream."""
        return self._chat(result) if self.is_chat else self._text(result)

    def opening(self) -> dict[str, Any] | None:
        """The chunk before the first token: the role, or the prompt's ids, or nothing."""
        choice: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}} if self.is_chat else {"text": ""}
        if self.wanted.return_token_ids:
            choice |= {"prompt_token_ids": self.prompt_ids, "token_ids": []}
        elif not self.is_chat:
            return None
        return self._chunk({**choice, "logprobs": None, "finish_reason": None})

    def chunk(self, delta: Delta, offset: int) -> dict[str, Any]:
        """New tokens. `offset`: characters sent before."""
        choice: dict[str, Any] = {"delta": {"content": delta.text}} if self.is_chat else {"text": delta.text}
        choice |= {"logprobs": self._logprobs(delta.logprobs, offset), "finish_reason": None}
        if self.wanted.return_token_ids:
            choice["token_ids"] = delta.ids
        return self._chunk(choice)

    def closing(self, reason: str) -> dict[str, Any]:
        """The chunk that says why it ended."""
        choice: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        if self.wanted.return_token_ids:
            choice["token_ids"] = []
        return self._chunk({**choice, "logprobs": None, "finish_reason": reason})

    def usage(self, num_output: int) -> dict[str, Any]:
        """The chunk after the last one, if it was asked for."""
        usage = Usage(prompt_tokens=len(self.prompt_ids), completion_tokens=num_output)
        return {**self._head(), "object": self._chunk_kind, "choices": [], "usage": usage_of(usage)}

    def _text(self, result: Result) -> Completion:
        choice: CompletionChoice = {
            "index": 0,
            "finish_reason": result.finish_reason,
            "text": result.text,
            "logprobs": None if result.logprobs is None else self._text_logprobs(result.logprobs, 0),
            **self._token_fields(result),
        }
        return {**self._head(), "object": "text_completion", "choices": [choice], "usage": usage_of(result.usage)}

    def _chat(self, result: Result) -> ChatCompletion:
        choice: ChatChoice = {
            "index": 0,
            "finish_reason": result.finish_reason,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": None if result.logprobs is None else self._chat_logprobs(result.logprobs),
            **self._token_fields(result),
        }
        return {**self._head(), "object": "chat.completion", "choices": [choice], "usage": usage_of(result.usage)}

    def _token_fields(self, result: Result) -> TokenFields:
        if not self.wanted.return_token_ids:
            return {}
        return {"prompt_token_ids": self.prompt_ids, "token_ids": result.token_ids}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        document = {**self._head(), "object": self._chunk_kind, "choices": [{"index": 0, **choice}]}
        return {**document, "usage": None} if self.wanted.include_usage else document

    def _head(self) -> AnswerHead:
        return {
            "id": self.public_id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None, offset: int) -> ChatLogprobs | TextLogprobs | None:
        if logprobs is None:
            return None
        return self._chat_logprobs(logprobs) if self.is_chat else self._text_logprobs(logprobs, offset)

    def _chat_logprobs(self, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
        content: list[ContentLogprob] = [
            {
                **self._named(entry.token_id, entry.logprob),
                "top_logprobs": [self._named(token_id, value) for token_id, value in entry.top],
            }
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def _named(self, token_id: int, logprob: float) -> NamedLogprob:
        text = self.tokens.token_text(token_id)
        # Bytes that are no character by themselves have no text to take them from.
        return {"token": text, "logprob": logprob, "bytes": None if BROKEN in text else list(text.encode())}

    def _text_logprobs(self, logprobs: Sequence[TokenLogprob], offset: int) -> TextLogprobs:
        texts = [self.tokens.token_text(entry.token_id) for entry in logprobs]
        offsets = list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else []
        top = [self._likeliest(entry) for entry in logprobs]
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _likeliest(self, entry: TokenLogprob) -> dict[str, float]:
        """By text, best first; of tokens with equal text the likeliest stays."""
        found: dict[str, float] = {}
        for token_id, logprob in entry.top:
            found.setdefault(self.tokens.token_text(token_id), logprob)
        return found


def usage_of(usage: Usage) -> CompletionUsage:
    """With the total, as OpenAI counts."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def summary_document(job: JobSummary) -> JobListed:
    """A job in a list."""
    return {
        **_job_head(job),
        "prompt_start": job.prompt_start,
        "finish_reason": job.finish_reason,
        "usage": None if job.usage is None else usage_of(job.usage),
    }


def job_document(job: Job) -> JobDocument:
    """A job as the native API shows it."""
    return {
        **_job_head(job),
        "prompt": job.prompt,
        "prompt_token_ids": job.prompt_token_ids,
        "params": job.params,
        "seed": job.seed,
        "metadata": job.metadata,
        "result": None if job.result is None else _job_result(job.result),
    }


def _job_head(job: Job | JobSummary) -> JobHead:
    return {
        "id": job.id,
        "object": "job",
        "state": job.state,
        "model": job.model,
        "tenant": job.tenant,
        "priority": job.priority,
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "cancel_requested": job.cancel_requested,
        "crashes": job.crashes,
        "replay_of": job.replay_of,
        "error": job.error,
    }


def _job_result(result: Result) -> JobResult:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "usage": usage_of(result.usage),
        "logprobs": result.logprobs,
        "exact": result.exact,
        "timings": result.timings,
        "provenance": result.provenance,
    }
