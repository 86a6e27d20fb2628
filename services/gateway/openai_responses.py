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
    NamedLogprob,
    TextLogprobs,
    TokenFields,
)
from services.gateway.openai import AnswerOptions
from shardline.job import Result, TokenLogprob, Usage
from shardline.tokenize import Tokens
from shardline.wire import Delta

BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiResponses:
    """Builds every answer and chunk of one request, for either of OpenAI's two doors."""

    is_chat: bool
    public_id: str
    model: str
    created: int
    system_fingerprint: str
    options: AnswerOptions
    tokens: Tokens
    prompt_ids: tuple[int, ...]

    def whole(self, result: Result) -> Completion | ChatCompletion:
        """The answer to a request that does not stream."""
        return self._chat(result) if self.is_chat else self._text(result)

    def opening_chunk(self) -> dict[str, Any] | None:
        """The chunk before the first token: the role, or the prompt's ids, or nothing."""
        choice: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}} if self.is_chat else {"text": ""}
        if self.options.return_token_ids:
            choice |= {"prompt_token_ids": self.prompt_ids, "token_ids": []}
        elif not self.is_chat:
            return None
        return self._chunk({**choice, "logprobs": None, "finish_reason": None})

    def chunk(self, delta: Delta, offset: int) -> dict[str, Any]:
        """A chunk of new tokens, after `offset` characters that were sent before."""
        choice: dict[str, Any] = {"delta": {"content": delta.text}} if self.is_chat else {"text": delta.text}
        choice |= {"logprobs": self._logprobs(delta.logprobs, offset), "finish_reason": None}
        if self.options.return_token_ids:
            choice["token_ids"] = delta.ids
        return self._chunk(choice)

    def final_chunk(self, reason: str) -> dict[str, Any]:
        """The chunk with the finish reason."""
        choice: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        if self.options.return_token_ids:
            choice["token_ids"] = []
        return self._chunk({**choice, "logprobs": None, "finish_reason": reason})

    def usage_chunk(self, num_output: int) -> dict[str, Any]:
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
        if not self.options.return_token_ids:
            return {}
        return {"prompt_token_ids": self.prompt_ids, "token_ids": result.token_ids}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        document = {**self._head(), "object": self._chunk_kind, "choices": [{"index": 0, **choice}]}
        return {**document, "usage": None} if self.options.include_usage else document

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
        # Bytes that are not a whole character have no text to encode.
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
        """Alternatives by text, likeliest first; of tokens with equal text the likeliest stays."""
        found: dict[str, float] = {}
        for token_id, logprob in entry.top:
            found.setdefault(self.tokens.token_text(token_id), logprob)
        return found


def usage_of(usage: Usage) -> CompletionUsage:
    """Usage with its total, as OpenAI reports it."""
    counts: CompletionUsage = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    if usage.cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return counts
