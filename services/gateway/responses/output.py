"""A response's output: its items and its numbered events, token by token. Knows no transport.

A pure function of the job's row and its tokens: each token gives the events for what it settles, so
that events and numbers do not depend on how tokens arrive, and a stream that is joined again, from
Postgres alone, goes on with those that would have come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from msgspec import UNSET
from msgspec.structs import replace

from services.gateway.openai.bodies import ContentLogprob
from services.gateway.openai.responses import LogprobTexts, content_logprobs
from services.gateway.responses import events
from services.gateway.responses.custom_tools import InputReader
from services.gateway.responses.input_items import ReasoningText
from services.gateway.responses.output_items import (
    CallItem,
    CustomCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
)
from services.gateway.responses.tools import JOINT
from shardline.contract.chat import ReplyDelta, ToolCallDelta
from shardline.contract.job import TokenLogprob
from shardline_server.replies import ReplyParser
from shardline_server.tokenize import CompletionText


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolNames:
    """What a request calls tools that a job has as plain functions."""

    namespaces: Mapping[str, str] = field(default_factory=dict)
    """Of functions that have one, by their names in the job."""
    custom: Collection[str] = ()
    """Custom tools."""


NO_NAMES = ToolNames()


@dataclass(slots=True, kw_only=True)
class OpenItem:
    """The item that is being generated."""

    item: OutputItem
    """As it was added, empty."""
    call_index: int | None = None
    """Of a call: its number among the calls of the reply."""
    reader: InputReader | None = None
    """Of a call of a custom tool."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[ContentLogprob] = field(default_factory=list)


class ResponseOutput:
    """Feed it with `push`, then call `end`. The first event has the number `first_number`."""

    def __init__(
        self,
        job_id: UUID,
        *,
        completion: CompletionText,
        replies: ReplyParser,
        with_reasoning: bool = True,
        logprob_texts: LogprobTexts | None = None,
        tools: ToolNames = NO_NAMES,
        first_number: int = 0,
    ) -> None:
        self.items: list[OutputItem] = []
        """Those that are done."""
        self.next_number = first_number
        self.num_tokens = 0
        self._job_id = job_id
        self._completion = completion
        self._replies = replies
        self._with_reasoning = with_reasoning
        self._logprob_texts = logprob_texts
        self._tools = tools
        self._logprobs: list[ContentLogprob] = []
        """Of tokens that have settled no text yet."""
        self._open: OpenItem | None = None
        self._events: list[events.ResponseEvent] = []

    def push(
        self, ids: Iterable[int], logprobs: Sequence[TokenLogprob] | None = None
    ) -> list[events.ResponseEvent]:
        """The events of the next tokens. `logprobs` has an entry for each of them, or is None."""
        for place, token_id in enumerate(ids):
            self.num_tokens += 1
            if logprobs:
                self._settle(logprobs[place : place + 1], is_end=False)
            text, _ = self._completion.push(token_id)
            if text:
                self._add_parts(self._replies.push_parts(text))
        return self._take()

    def end(self, status: ItemStatus) -> list[events.ResponseEvent]:
        """The events after the last token; `status` is that of the last item."""
        self._settle((), is_end=True)
        text = self._completion.flush()
        if text:
            self._add_parts(self._replies.push_parts(text))
        self._add_parts(self._replies.end_parts())
        if self._open is None and not self.items:
            # No output is an empty message.
            self._begin_message()
        self._close(status, is_last=True)
        return self._take()

    def _take(self) -> list[events.ResponseEvent]:
        found = self._events
        self._events = []
        return found

    def _settle(self, logprobs: Sequence[TokenLogprob], *, is_end: bool) -> None:
        if self._logprob_texts is not None:
            entries = self._logprob_texts.push(logprobs, is_end=is_end)
            self._logprobs += content_logprobs(entries, self._logprob_texts)

    def _add_parts(self, parts: Iterable[ReplyDelta]) -> None:
        for part in parts:
            self._add_part(part)

    def _add_part(self, delta: ReplyDelta) -> None:
        if delta.reasoning:
            self._logprobs.clear()
        if delta.reasoning and self._with_reasoning:
            if not isinstance(self._open_item, ReasoningItem):
                self._begin_reasoning()
            self._add(events.ReasoningDelta, delta.reasoning)
        if delta.content:
            if not isinstance(self._open_item, MessageItem):
                self._begin_message()
            self._add(events.TextDelta, delta.content, logprobs=self._take_logprobs())
        for call in delta.tool_calls:
            self._logprobs.clear()
            self._add_call(call)

    def _add_call(self, call: ToolCallDelta) -> None:
        if self._open is None or self._open.call_index != call.index:
            self._begin_call(call)
        assert self._open is not None
        if self._open.reader is None:
            self._add(events.ArgumentsDelta, call.arguments)
        else:
            self._add(events.CustomInputDelta, self._open.reader.push(call.arguments))

    @property
    def _open_item(self) -> OutputItem | None:
        return None if self._open is None else self._open.item

    def _take_logprobs(self) -> list[ContentLogprob]:
        """Those of the text of this event; the item keeps them too."""
        found = self._logprobs
        self._logprobs = []
        assert self._open is not None
        self._open.logprobs += found
        return found

    def _begin_message(self) -> None:
        self._begin(MessageItem(id=self._new_id("msg"), status="in_progress", content=[]))
        self._put(events.PartAdded, part=OutputText(text=""))

    def _begin_reasoning(self) -> None:
        self._begin(ReasoningItem(id=self._new_id("rs"), status="in_progress", content=[]))
        self._put(events.PartAdded, part=ReasoningText(text=""))

    def _begin_call(self, call: ToolCallDelta) -> None:
        name = call.name or ""
        is_custom = name in self._tools.custom
        item_id = self._new_id("ctc" if is_custom else "fc")
        call_id = call.id or f"call_{item_id.partition('_')[2]}"
        namespace = self._tools.namespaces.get(name)
        item: OutputItem
        if is_custom:
            item = CustomCallItem(
                id=item_id, status="in_progress", call_id=call_id, name=name, input=""
            )
        else:
            item = CallItem(
                id=item_id,
                status="in_progress",
                call_id=call_id,
                name=name if namespace is None else name.removeprefix(namespace + JOINT),
                namespace=UNSET if namespace is None else namespace,
                arguments="",
            )
        self._begin(item, call.index)

    def _begin(self, item: OutputItem, call_index: int | None = None) -> None:
        self._close("completed")
        reader = InputReader() if isinstance(item, CustomCallItem) else None
        self._open = OpenItem(item=item, call_index=call_index, reader=reader)
        self._number(events.ItemAdded, output_index=len(self.items), item=item)

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._job_id}_{len(self.items) + (self._open is not None)}"

    def _add(self, kind: type[events.ResponseEvent], text: str, **fields: Any) -> None:
        if not text:
            return
        assert self._open is not None
        self._open.texts.append(text)
        self._put(kind, delta=text, **fields)

    def _close(self, status: ItemStatus, *, is_last: bool = False) -> None:
        """End the open item, if there is one."""
        if self._open is None:
            return
        item = self._open.item
        if self._open.reader is not None:
            self._add(events.CustomInputDelta, self._open.reader.end())
        text = "".join(self._open.texts)
        if isinstance(item, MessageItem):
            if is_last:
                # Those of tokens behind the text: the end token, a stop string.
                self._take_logprobs()
            part = OutputText(text=text, logprobs=self._open.logprobs)
            self._put(events.TextDone, text=text, logprobs=part.logprobs)
            self._put(events.PartDone, part=part)
            self._finish(replace(item, status=status, content=[part]))
        elif isinstance(item, ReasoningItem):
            thought = ReasoningText(text=text)
            self._put(events.ReasoningDone, text=text)
            self._put(events.PartDone, part=thought)
            self._finish(replace(item, status=status, content=[thought]))
        elif isinstance(item, CustomCallItem):
            self._put(events.CustomInputDone, input=text)
            self._finish(replace(item, status=status, input=text))
        else:
            self._put(events.ArgumentsDone, name=item.name, arguments=text)
            self._finish(replace(item, status=status, arguments=text))

    def _finish(self, item: OutputItem) -> None:
        self._number(events.ItemDone, output_index=len(self.items), item=item)
        self.items.append(item)
        self._open = None

    def _put(self, kind: type[events.ResponseEvent], **fields: Any) -> None:
        """An event inside of the open item."""
        assert self._open is not None
        self._number(kind, item_id=self._open.item.id, output_index=len(self.items), **fields)

    def _number(self, kind: type[events.ResponseEvent], **fields: Any) -> None:
        self._events.append(kind(sequence_number=self.next_number, **fields))
        self.next_number += 1
