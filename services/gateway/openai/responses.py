"""Completions in OpenAI's shapes: whole, in chunks, with log-probabilities. Knows no transport."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from services.gateway.bodies import CompletionUsage
from services.gateway.openai import bodies
from services.gateway.openai.prompt_logprobs import (
    echoed_logprobs,
    joined_logprobs,
    likeliest,
    ranked_logprobs,
)
from services.gateway.openai.reply_reader import ReplyReader
from services.gateway.openai.system_fingerprint import fingerprint_of
from shardline.contract.chat import Reply, ReplyDelta, ToolCallDelta
from shardline.contract.job import FinishReason, Result, TokenLogprob, Usage
from shardline.contract.wire import Delta
from shardline_server.tokenize import Tokens, TokenText, TokenTexts

NO_DELTA = bodies.ChatDelta()


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
        settled = self._texts.push([entry.token_id for entry in logprobs], is_end=is_end)
        return [(self._waiting.popleft(), token) for token in settled]

    def new(self, delta: Delta) -> Sequence[TokenLogprob] | None:
        """Returns the delta's new entries for its chunk; None if the chunk has none at all."""
        is_last = delta.state is not None and bool(self._waiting)
        return delta.logprobs or (() if is_last else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseParts:
    """What the answers and chunks of all routes share."""

    head: bodies.AnswerHead
    request: bodies.OpenAiRequest
    tokens: Tokens
    prompt_ids: tuple[int, ...]
    job_id: UUID
    index: int = 0
    """Of this one among the choices of its request."""
    chunk_kind: ClassVar[type[bodies.CompletionChunk | bodies.ChatChunk]]
    no_text: ClassVar[Any]
    """The choice of a chunk without new tokens."""

    def logprob_texts(self) -> LogprobTexts:
        """What the chunks of one stream go on with: the texts and places of its tokens."""
        return LogprobTexts(self.tokens.token_texts(self.request.params(), self.prompt_ids))

    def shown(self, result: Result) -> Result:
        """Returns what an answer shows of it: no token, if the prompt alone was asked for."""
        if self.request.length != 0:
            return result
        return replace(
            result,
            text="",
            token_ids=(),
            finish_reason=FinishReason.LENGTH,
            logprobs=None if result.logprobs is None else (),
            usage=replace(result.usage, completion_tokens=0),
        )

    def reply_reader(self) -> ReplyReader:
        """Returns what parses the text of one stream; of a prompt's completion, all is content."""
        return ReplyReader(None)

    def final_chunk(self, reason: FinishReason, *, has_calls: bool = False) -> msgspec.Struct:
        """The chunk with the finish reason."""
        return self._chunk(finish_reason=_finish_reason(reason, has_calls=has_calls))

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The chunk after the last one of all choices, if it was asked for."""
        return self.chunk_kind(**self._head(), choices=[], usage=CompletionUsage.of(usage))

    def counted(self, chunk: msgspec.Struct, num_output: int) -> msgspec.Struct:
        """Returns a chunk with the usage until its end, if it was asked for."""
        options = self.request.stream_options
        if not (options.include_usage and options.continuous_usage_stats):
            return chunk
        usage = Usage(prompt_tokens=len(self.prompt_ids), completion_tokens=num_output)
        return replace(chunk, usage=CompletionUsage.of(usage))

    def _chunk(self, token_ids: tuple[int, ...] = (), **fields: Any) -> msgspec.Struct:
        choice = replace(self.no_text, index=self.index, token_ids=self._asked(token_ids), **fields)
        usage = None if self.request.stream_options.include_usage else UNSET
        return self.chunk_kind(**self._head(), choices=[choice], usage=usage)

    def _head(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self.head)

    def _head_of(self, result: Result) -> dict[str, Any]:
        head = self._head()
        fingerprint = fingerprint_of(result)
        return head if fingerprint is None else {**head, "system_fingerprint": fingerprint}

    def _asked(self, token_ids: tuple[int, ...]) -> bodies.TokenIds:
        return token_ids if self.request.return_token_ids else UNSET

    def _prompt_logprobs(self, result: Result) -> bodies.PromptLogprobs:
        if self.request.prompt_logprobs is None:
            return UNSET
        return ranked_logprobs(result.prompt_logprobs, self.tokens.vocabulary)


class CompletionResponses(ResponseParts):
    """Builds every answer and chunk of one completion."""

    __slots__ = ()
    prefix = "cmpl"
    chunk_kind = bodies.CompletionChunk
    no_text = bodies.CompletionChunkChoice(index=0, finish_reason=None, text="", logprobs=None)

    def whole(self, result: Result) -> bodies.Completion:
        """The answer to a request that does not stream."""
        result = self.shown(result)
        choice = bodies.CompletionChoice(
            index=self.index,
            finish_reason=result.finish_reason,
            text=self._echoed() + result.text,
            logprobs=self._logprobs(result),
            token_ids=self._asked(result.token_ids),
            prompt_token_ids=self._asked(self.prompt_ids),
            prompt_logprobs=self._prompt_logprobs(result),
        )
        usage = CompletionUsage.of(result.usage)
        return bodies.Completion(**self._head_of(result), choices=[choice], usage=usage)

    def _logprobs(self, result: Result) -> bodies.TextLogprobs | None:
        """Those of the completion, behind those of the prompt if that is echoed."""
        own = _text_logprobs(result.logprobs, self.logprob_texts())
        request = self.request
        if own is None or not isinstance(request, bodies.CompletionRequest) or not request.echo:
            return own
        texts = self.tokens.token_texts(request.params(), ())
        entries = result.prompt_logprobs or (None,) * len(self.prompt_ids)
        prompt = echoed_logprobs(self.prompt_ids, entries, texts, request.logprobs or 0)
        return joined_logprobs(prompt, own, len(self._echoed()))

    def opening_chunk(self) -> msgspec.Struct | None:
        """The chunk before the first token: the prompt's text or ids, or nothing."""
        echoed = self._echoed()
        if not echoed and not self.request.return_token_ids:
            return None
        return self._chunk(text=echoed, prompt_token_ids=self._asked(self.prompt_ids))

    def _echoed(self) -> str:
        """The prompt as it was sent, where it was sent as a text and is read whole; else that of
        its tokens."""
        request = self.request
        if not isinstance(request, bodies.CompletionRequest) or not request.echo:
            return ""
        if isinstance(request.prompt, str) and request.truncate_prompt_tokens is None:
            return request.prompt
        return self.tokens.text_of(self.prompt_ids, request.params())

    def chunk(self, delta: Delta, texts: LogprobTexts, reply: ReplyDelta) -> msgspec.Struct:
        """A chunk of new tokens; `texts` has had those of the chunks before."""
        logprobs = _text_logprobs(texts.new(delta), texts, is_end=delta.state is not None)
        return self._chunk(delta.ids, text=reply.content, logprobs=logprobs)


class ChatResponses(ResponseParts):
    """Builds every answer and chunk of one chat completion."""

    __slots__ = ()
    prefix = "chatcmpl"
    chunk_kind = bodies.ChatChunk
    no_text = bodies.ChatChunkChoice(index=0, finish_reason=None, delta=NO_DELTA, logprobs=None)

    def whole(self, result: Result) -> bodies.ChatCompletion:
        """The answer to a request that does not stream."""
        params = self.request.params()
        reply = self.tokens.chat.reply(result.text, params, self.job_id, self.prompt_ids)
        has_calls = bool(reply.tool_calls)
        choice = bodies.ChatChoice(
            index=self.index,
            finish_reason=_finish_reason(result.finish_reason, has_calls=has_calls),
            message=self._message(reply),
            logprobs=_chat_logprobs(result.logprobs, self.logprob_texts()),
            token_ids=self._asked(result.token_ids),
        )
        usage = CompletionUsage.of(result.usage)
        ids = self._asked(self.prompt_ids)
        scores = self._prompt_logprobs(result)
        head = {**self._head_of(result), "prompt_token_ids": ids, "prompt_logprobs": scores}
        return bodies.ChatCompletion(**head, choices=[choice], usage=usage)

    def _message(self, reply: Reply) -> bodies.AssistantMessage:
        reasoning = self._shown_reasoning(reply.reasoning)
        return bodies.AssistantMessage(
            role="assistant",
            content=reply.content or (None if reply.tool_calls else ""),
            refusal=None,
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=reply.tool_calls or UNSET,
        )

    def _shown_reasoning(self, reasoning: str | None) -> str | UnsetType:
        return reasoning if reasoning and self.request.include_reasoning else UNSET

    def reply_reader(self) -> ReplyReader:
        """Returns what parses the text of one stream."""
        params = self.request.params()
        return ReplyReader(
            self.tokens.chat.parser(params, self.job_id, self.prompt_ids),
            with_reasoning=params.include_reasoning,
        )

    def opening_chunk(self) -> msgspec.Struct:
        """The chunk before the first token: the role, and the prompt's ids."""
        opening = self._chunk(delta=bodies.ChatDelta(role="assistant", content=""))
        return replace(opening, prompt_token_ids=self._asked(self.prompt_ids))

    def chunk(self, delta: Delta, texts: LogprobTexts, reply: ReplyDelta) -> msgspec.Struct:
        """A chunk of new tokens; `texts` has had those of the chunks before."""
        logprobs = _chat_logprobs(texts.new(delta), texts, is_end=delta.state is not None)
        reasoning = self._shown_reasoning(reply.reasoning)
        chat_delta = bodies.ChatDelta(
            content=reply.content or UNSET,
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=tuple(_call_delta(call) for call in reply.tool_calls) or UNSET,
        )
        return self._chunk(delta.ids, delta=chat_delta, logprobs=logprobs)


def _finish_reason(reason: FinishReason, *, has_calls: bool) -> bodies.ChatFinishReason:
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_calls else "stop"


def _call_delta(call: ToolCallDelta) -> bodies.ChatToolCallDelta:
    is_first = call.id is not None
    return bodies.ChatToolCallDelta(
        index=call.index,
        id=call.id or UNSET,
        type="function" if is_first else UNSET,
        function=bodies.FunctionCallDelta(name=call.name or UNSET, arguments=call.arguments),
    )


OpenAiResponses = CompletionResponses | ChatResponses


def _chat_logprobs(
    logprobs: Sequence[TokenLogprob] | None, texts: LogprobTexts, *, is_end: bool = True
) -> bodies.ChatLogprobs | None:
    if logprobs is None:
        return None
    content = content_logprobs(texts.push(logprobs, is_end=is_end), texts)
    return bodies.ChatLogprobs(content=content, refusal=None)


def content_logprobs(
    entries: Iterable[tuple[TokenLogprob, TokenText]], texts: LogprobTexts
) -> list[bodies.ContentLogprob]:
    """Log-probabilities with the texts of their tokens, from `texts`, as chats show them."""
    return [
        bodies.ContentLogprob(
            token=token.text,
            logprob=entry.logprob,
            bytes=list(token.data),
            top_logprobs=[
                _named(token.text, token.data, value)
                if token_id == entry.token_id
                else _named(*texts.alternative(token_id), value)
                for token_id, value in entry.top
            ],
        )
        for entry, token in entries
    ]


def _text_logprobs(
    logprobs: Sequence[TokenLogprob] | None, texts: LogprobTexts, *, is_end: bool = True
) -> bodies.TextLogprobs | None:
    if logprobs is None:
        return None
    entries = texts.push(logprobs, is_end=is_end)
    return bodies.TextLogprobs(
        tokens=[token.text for _, token in entries],
        token_logprobs=[entry.logprob for entry, _ in entries],
        top_logprobs=[likeliest(entry, token.text, texts) for entry, token in entries],
        text_offset=[token.offset for _, token in entries],
    )


def _named(text: str, data: bytes, logprob: float) -> bodies.NamedLogprob:
    return bodies.NamedLogprob(token=text, logprob=logprob, bytes=list(data))
