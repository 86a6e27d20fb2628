"""A job's reply as a message in Anthropic's form: whole, or as the events of a stream. Knows no
transport."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import replace

from services.gateway.anthropic import answers
from services.gateway.anthropic.requests import MessageRequest
from services.gateway.openai.reply_reader import ReplyReader
from shardline.contract.chat import ReplyDelta
from shardline.contract.job import FinishReason, JobState, Result, Usage
from shardline.contract.wire import Delta
from shardline_server.tokenize import CompletionText, Tokens

BlockText = answers.MessageTextDelta | answers.ThinkingDelta | answers.InputDelta

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
        events = MessageEvents(self)
        state = JobState.SUCCEEDED
        all_of_it = Delta(fence=0, start=0, ids=result.token_ids, text=result.text, state=state)
        blocks = _blocks(events.push(all_of_it))
        return self._answer(blocks, result.usage, events.why_ended(result.finish_reason))

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

    def push(self, delta: Delta) -> list[answers.MessageEvent]:
        """Return the events of new tokens."""
        if self._text is not None:
            self._text.say(delta.ids)
        parts = self._reader.parts(delta.text, is_last=delta.state is not None)
        return [event for part in parts for event in self._events_of(part)]

    def _events_of(self, part: ReplyDelta) -> Iterator[answers.MessageEvent]:
        if part.reasoning:
            yield from self._block("thinking", answers.ThinkingBlock(thinking=""))
            yield self._delta(answers.ThinkingDelta(thinking=part.reasoning))
        if part.content:
            yield from self._block("text", answers.TextBlock(text=""))
            yield self._delta(answers.MessageTextDelta(text=part.content))
        for call in part.tool_calls:
            block = answers.ToolUseBlock(id=call.id or "", name=call.name or "", input={})
            yield from self._block(call.index, block)
            if call.arguments:
                yield self._delta(answers.InputDelta(partial_json=call.arguments))

    def end(self, reason: FinishReason, usage: Usage) -> Iterator[answers.MessageEvent]:
        """Return what follows the last token."""
        yield from self._close()
        end = self.why_ended(reason)
        yield answers.MessageDelta(delta=end, usage=answers.MessageUsage.of(usage))
        yield answers.MessageStop()

    def why_ended(self, reason: FinishReason) -> answers.MessageEnd:
        """Return why the message ends, once all its tokens were pushed."""
        return self._parts.end(reason, self._text, has_calls=self._reader.has_calls)

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

    def _delta(self, delta: BlockText) -> answers.MessageEvent:
        return answers.BlockDelta(index=self._num_blocks, delta=delta)


def _blocks(events: Iterable[answers.MessageEvent]) -> list[answers.Block]:
    """Returns the blocks that a stream with these events has."""
    begun: list[answers.Block] = []
    texts: list[list[str]] = []
    for event in events:
        if isinstance(event, answers.BlockStart):
            begun.append(event.content_block)
            texts.append([])
        elif isinstance(event, answers.BlockDelta):
            texts[-1].append(_text_of(event.delta))
    return [_whole_block(*pair) for pair in zip(begun, map("".join, texts), strict=True)]


def _text_of(delta: BlockText) -> str:
    if isinstance(delta, answers.MessageTextDelta):
        return delta.text
    return delta.thinking if isinstance(delta, answers.ThinkingDelta) else delta.partial_json


def _whole_block(empty: answers.Block, text: str) -> answers.Block:
    if isinstance(empty, answers.TextBlock):
        return replace(empty, text=text)
    if isinstance(empty, answers.ThinkingBlock):
        return replace(empty, thinking=text)
    return replace(empty, input=_input(text))


def _input(arguments: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {INVALID_JSON: arguments}
