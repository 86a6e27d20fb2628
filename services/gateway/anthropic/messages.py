"""A job's reply as a message in Anthropic's form: whole, or as the events of a stream. Knows no
transport."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec

from services.gateway.anthropic import answers
from services.gateway.anthropic.requests import MessageRequest
from services.gateway.openai.reply_reader import ReplyReader
from shardline.contract.chat import Reply, ReplyDelta
from shardline.contract.job import FinishReason, Result, Usage
from shardline.contract.wire import Delta
from shardline_server.tokenize import CompletionText, Tokens

INVALID_JSON = "INVALID_JSON"
"""The key that Anthropic names for an input that is no JSON object, such as one that was cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageParts:
    """What an answer and every event of one message share."""

    job_id: UUID
    model: str
    request: MessageRequest
    tokens: Tokens
    prompt_ids: tuple[int, ...]
    max_tokens: int
    """As it was accepted: no more than the prompt leaves."""

    def whole(self, result: Result) -> answers.MessageAnswer:
        """The answer to a request that does not stream."""
        reply = self._reply(result)
        text = self.stop_text()
        if text is not None:
            text.say(result.token_ids)
        end = self.end(result.finish_reason, text, has_calls=bool(reply.tool_calls))
        return self._answer(_blocks(reply), result.usage, end)

    def opening(self) -> answers.MessageAnswer:
        """The message before its first token."""
        usage = Usage(prompt_tokens=len(self.prompt_ids), completion_tokens=0)
        return self._answer([], usage, None)

    def stop_text(self) -> CompletionText | None:
        """What finds the stop sequence that ends the message, from its tokens; None if there is
        none to find."""
        params = self.request.params()
        if not params.stop:
            return None
        return self.tokens.completion(params, self.max_tokens, self.prompt_ids)

    def end(
        self, reason: FinishReason, text: CompletionText | None, *, has_calls: bool
    ) -> answers.MessageEnd:
        """Why the message ends. `text` has had all its tokens."""
        found = None if text is None else text.stop_string
        if reason is FinishReason.LENGTH:
            is_cut = self.max_tokens < (self.request.max_tokens or 0)
            stop: answers.StopReason = "model_context_window_exceeded" if is_cut else "max_tokens"
        elif found is not None:
            stop = "stop_sequence"
        else:
            stop = "tool_use" if has_calls else "end_turn"
        sequence = found if stop == "stop_sequence" else None
        return answers.MessageEnd(stop_reason=stop, stop_sequence=sequence)

    @property
    def id(self) -> str:
        """The message's."""
        return f"msg_{self.job_id}"

    def reply_reader(self) -> ReplyReader:
        """Return what reads the deltas of one stream."""
        params = self.request.params()
        parser = self.tokens.chat.parser(params, self.job_id, self.prompt_ids)
        return ReplyReader(parser, with_reasoning=params.include_reasoning)

    def _reply(self, result: Result) -> Reply:
        params = self.request.params()
        reply = self.tokens.chat.reply(result.text, params, self.job_id, self.prompt_ids)
        shows_all = params.include_reasoning
        return reply if shows_all else msgspec.structs.replace(reply, reasoning=None)

    def _answer(
        self, blocks: list[answers.Block], usage: Usage, end: answers.MessageEnd | None
    ) -> answers.MessageAnswer:
        return answers.MessageAnswer(
            id=self.id,
            model=self.model,
            content=blocks,
            stop_reason=None if end is None else end.stop_reason,
            stop_sequence=None if end is None else end.stop_sequence,
            usage=answers.MessageUsage.of(usage),
        )


class MessageEvents:
    """The events of one streamed message, in their order: blocks begin and end as the reply goes
    from thoughts to text and calls."""

    def __init__(self, parts: MessageParts) -> None:
        self._parts = parts
        self._text = parts.stop_text()
        self._reader = parts.reply_reader()
        self._num_blocks = 0
        self._open: str | int | None = None
        """What the open block holds: `text`, `thinking`, or the number of a call."""

    def begin(self) -> Iterator[answers.MessageEvent]:
        """Return what comes before the first token."""
        yield answers.MessageStart(message=self._parts.opening())
        yield answers.Ping()

    def push(self, delta: Delta) -> Iterator[answers.MessageEvent]:
        """Return the events of new tokens."""
        if self._text is not None:
            self._text.say(delta.ids)
        yield from self._told(self._reader.read(delta))

    def _told(self, said: ReplyDelta) -> Iterator[answers.MessageEvent]:
        if said.reasoning:
            yield from self._block("thinking", answers.ThinkingBlock(thinking=""))
            yield self._delta(answers.ThinkingDelta(thinking=said.reasoning))
        if said.content:
            yield from self._block("text", answers.TextBlock(text=""))
            yield self._delta(answers.TextDelta(text=said.content))
        for call in said.tool_calls:
            block = answers.ToolUseBlock(id=call.id or "", name=call.name or "", input={})
            yield from self._block(call.index, block)
            if call.arguments:
                yield self._delta(answers.InputDelta(partial_json=call.arguments))

    def end(self, reason: FinishReason, usage: Usage) -> Iterator[answers.MessageEvent]:
        """Return what follows the last token."""
        yield from self._close()
        end = self._parts.end(reason, self._text, has_calls=self._reader.has_calls)
        yield answers.MessageDelta(delta=end, usage=answers.MessageUsage.of(usage))
        yield answers.MessageStop()

    def _block(self, holds: str | int, empty: answers.Block) -> Iterator[answers.MessageEvent]:
        """Begin a block, unless the open one holds the same."""
        if self._open == holds:
            return
        yield from self._close()
        self._open = holds
        yield answers.BlockStart(index=self._num_blocks, content_block=empty)

    def _close(self) -> Iterator[answers.MessageEvent]:
        if self._open is not None:
            yield answers.BlockStop(index=self._num_blocks)
            self._num_blocks += 1
            self._open = None

    def _delta(
        self, delta: answers.TextDelta | answers.ThinkingDelta | answers.InputDelta
    ) -> answers.MessageEvent:
        return answers.BlockDelta(index=self._num_blocks, delta=delta)


def _blocks(reply: Reply) -> list[answers.Block]:
    blocks: list[answers.Block] = []
    if reply.reasoning:
        blocks.append(answers.ThinkingBlock(thinking=reply.reasoning))
    if reply.content:
        blocks.append(answers.TextBlock(text=reply.content))
    for call in reply.tool_calls:
        given = _input(call.function.arguments)
        blocks.append(answers.ToolUseBlock(id=call.id, name=call.function.name, input=given))
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {INVALID_JSON: arguments}
