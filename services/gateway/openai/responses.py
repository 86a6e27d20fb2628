"""Completions in OpenAI's shapes: whole, in chunks, with log-probabilities. Knows no transport."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
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
    PromptFields,
    TextLogprobs,
    TokenFields,
)
from services.gateway.openai.requests import AnswerOptions
from shardline.contract.job import Result, SamplingParams, TokenLogprob, Usage
from shardline.contract.wire import Delta
from shardline.tokenize import BROKEN, Piece, Tokens, TokenText, TokenTexts


class LogprobTexts:
    """The log-probabilities of one completion with the texts of their tokens, at once or in the
    chunks of a stream."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._waiting: deque[TokenLogprob] = deque()
        self.alternative = texts.alternative

    def push(
        self, logprobs: Sequence[TokenLogprob], *, is_end: bool = True
    ) -> list[tuple[TokenLogprob, TokenText]]:
        """Returns those with settled texts; one with a character that may still become whole waits
        for it, or for the end."""
        self._waiting.extend(logprobs)
        told = self._texts.push([entry.token_id for entry in logprobs], is_end=is_end)
        return [(self._waiting.popleft(), token) for token in told]

    def has_new(self, delta: Delta) -> bool:
        """Whether a chunk of this delta has log-probabilities."""
        return bool(delta.logprobs) or (delta.state is not None and bool(self._waiting))


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
    params: SamplingParams
    prompt_ids: tuple[int, ...]

    def logprob_texts(self) -> LogprobTexts:
        """What the chunks of one stream go on with: the texts and places of its tokens."""
        return LogprobTexts(self.tokens.token_texts(self.params, self.prompt_ids))

    def whole(self, result: Result) -> Completion | ChatCompletion:
        """The answer to a request that does not stream."""
        return self._chat(result) if self.is_chat else self._text(result)

    def opening_chunk(self) -> dict[str, Any] | None:
        """The chunk before the first token: the role, or the prompt's ids, or nothing."""
        if not (self.is_chat or self.options.return_token_ids):
            return None
        choice: dict[str, Any] = (
            {"delta": {"role": "assistant", "content": ""}} if self.is_chat else {"text": ""}
        )
        choice |= {"logprobs": None, "finish_reason": None}
        if self.options.return_token_ids:
            choice["token_ids"] = []
        prompt = self._prompt_fields()
        return (
            {**self._chunk(choice), **prompt} if self.is_chat else self._chunk({**choice, **prompt})
        )

    def chunk(self, delta: Delta, texts: LogprobTexts) -> dict[str, Any]:
        """A chunk of new tokens; `texts` has had those of the chunks before."""
        choice: dict[str, Any] = (
            {"delta": {"content": delta.text}} if self.is_chat else {"text": delta.text}
        )
        choice |= {"logprobs": self._chunk_logprobs(delta, texts), "finish_reason": None}
        if self.options.return_token_ids:
            choice["token_ids"] = delta.ids
        return self._chunk(choice)

    def final_chunk(self, reason: str) -> dict[str, Any]:
        """The chunk with the finish reason."""
        choice: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        if self.options.return_token_ids:
            choice["token_ids"] = []
        return self._chunk({**choice, "logprobs": None, "finish_reason": reason})

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The chunk after the last one, if it was asked for."""
        return {**self._head(), "object": self._chunk_kind, "choices": [], "usage": usage_of(usage)}

    def _text(self, result: Result) -> Completion:
        choice: CompletionChoice = {
            "index": 0,
            "finish_reason": result.finish_reason,
            "text": result.text,
            "logprobs": None
            if result.logprobs is None
            else self._text_logprobs(result.logprobs, self.logprob_texts()),
            **self._token_fields(result),
            **self._prompt_fields(),
        }
        return {
            **self._head(),
            "object": "text_completion",
            "choices": [choice],
            "usage": usage_of(result.usage),
        }

    def _chat(self, result: Result) -> ChatCompletion:
        choice: ChatChoice = {
            "index": 0,
            "finish_reason": result.finish_reason,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": None
            if result.logprobs is None
            else self._chat_logprobs(result.logprobs, self.logprob_texts()),
            **self._token_fields(result),
        }
        return {
            **self._head(),
            **self._prompt_fields(),
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage_of(result.usage),
        }

    def _prompt_fields(self) -> PromptFields:
        return {"prompt_token_ids": self.prompt_ids} if self.options.return_token_ids else {}

    def _token_fields(self, result: Result) -> TokenFields:
        return {"token_ids": result.token_ids} if self.options.return_token_ids else {}

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

    def _chunk_logprobs(
        self, delta: Delta, texts: LogprobTexts
    ) -> ChatLogprobs | TextLogprobs | None:
        if not texts.has_new(delta):
            return None
        build = self._chat_logprobs if self.is_chat else self._text_logprobs
        return build(delta.logprobs or (), texts, is_end=delta.state is not None)

    def _chat_logprobs(
        self, logprobs: Sequence[TokenLogprob], texts: LogprobTexts, *, is_end: bool = True
    ) -> ChatLogprobs:
        content: list[ContentLogprob] = [
            {
                **_named(token.text, token.data, entry.logprob),
                "top_logprobs": [
                    _named(token.text, token.data, value)
                    if token_id == entry.token_id
                    else _named(*texts.alternative(token_id), value)
                    for token_id, value in entry.top
                ],
            }
            for entry, token in texts.push(logprobs, is_end=is_end)
        ]
        return {"content": content, "refusal": None}

    def _text_logprobs(
        self, logprobs: Sequence[TokenLogprob], texts: LogprobTexts, *, is_end: bool = True
    ) -> TextLogprobs:
        told = texts.push(logprobs, is_end=is_end)
        return {
            "tokens": [token.text for _, token in told],
            "token_logprobs": [entry.logprob for entry, _ in told],
            "top_logprobs": [_likeliest(entry, token.text, texts) for entry, token in told],
            "text_offset": [token.offset for _, token in told],
        }


def _named(text: str, data: bytes, logprob: float) -> NamedLogprob:
    return {"token": text, "logprob": logprob, "bytes": list(data)}


def _likeliest(entry: TokenLogprob, text: str, texts: LogprobTexts) -> dict[str, float]:
    """Alternatives by text, likeliest first, and among or behind them the output token, with the
    text `text`. Of tokens with one text, all but the first are named by their id."""
    found: dict[str, float] = {}
    for token_id, logprob in entry.top:
        name = text
        if token_id != entry.token_id:
            name = _shown(texts.alternative(token_id))
            if name in found or name == text:
                name = f"token_id:{token_id}"
        found[name] = logprob
    found.setdefault(text, entry.logprob)
    return found


def _shown(piece: Piece) -> str:
    """The text of a token, or its bytes, in OpenAI's form, where they are no whole characters."""
    if BROKEN not in piece.text or piece.data == piece.text.encode():
        return piece.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece.data)


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
