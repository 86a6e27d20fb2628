"""What a parser has found, as deltas. White space that only separates the parts of a reply is left
out; what is left out depends on the text alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import msgspec

from shardline.contract.chat import FunctionDefinition, ReplyDelta, ToolCallDelta
from shardline_server.replies.json_text import without_repeated_keys
from shardline_server.replies.text_source import Malformed


class _Prose:
    """Content or reasoning: white space waits until text follows it."""

    __slots__ = ("given", "has_text", "waiting")

    def __init__(self) -> None:
        self.given: list[str] = []
        self.waiting: list[str] = []
        self.has_text = False
        """Whether anything but white space has been given since the part began."""

    def add(self, text: str) -> None:
        """Appends text."""
        end = len(text.rstrip())
        if end:
            self.given += [*self.waiting, text[:end]]
            self.waiting = []
            self.has_text = True
        if end < len(text):
            self.waiting.append(text[end:])

    def drop_waiting(self) -> None:
        """Forgets the white space at the end."""
        self.waiting = []

    def give_waiting(self) -> None:
        """Gives the white space at the end."""
        self.given += self.waiting
        self.waiting = []

    def take(self) -> str:
        """Returns what was given since the last call."""
        text = "".join(self.given)
        self.given = []
        return text


class ReplySink:
    """Takes what a parser finds and gives it out as deltas."""

    __slots__ = (
        "_arguments",
        "_call",
        "_call_id",
        "_calls",
        "_content",
        "_ends_in_reasoning",
        "_has_call",
        "_ids",
        "_is_eager",
        "_num_calls",
        "_reasoning",
        "_skips_space",
        "_trims",
        "_waiting",
        "tools",
    )

    def __init__(
        self,
        tools: Mapping[str, FunctionDefinition],
        call_id: Callable[[int], str],
        *,
        trims: bool,
        is_eager: bool,
    ) -> None:
        self.tools = tools
        self._call_id = call_id
        self._trims = trims
        """Whether white space between content and a call is the template's."""
        self._is_eager = is_eager
        """Whether calls are told before they are whole."""
        self._content = _Prose()
        self._skips_space = False
        """Whether the white space that comes next only follows the reasoning."""
        self._reasoning = _Prose()
        self._ends_in_reasoning = False
        self._calls: list[ToolCallDelta] = []
        self._num_calls = 0
        self._ids: set[str] = set()
        self._call: ToolCallDelta | None = None
        """The call that is being read, without its arguments."""
        self._arguments: list[str] = []
        self._waiting: list[ToolCallDelta] = []
        """Whole calls of a list that is not whole."""
        self._has_call = False
        """Whether a call was the last thing told."""

    def content(self, text: str) -> None:
        """Takes content."""
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        if text:
            self._content.add(text)

    def reasoning(self, text: str) -> None:
        """Takes reasoning."""
        self._ends_in_reasoning = True
        if not self._reasoning.has_text:
            text = text.lstrip()
        self._reasoning.add(text)

    def end_reasoning(self) -> None:
        """Says that the reasoning is whole."""
        self._reasoning.drop_waiting()
        self._ends_in_reasoning = False
        self._skips_space = not self._content.has_text

    def end_part_of_reasoning(self) -> None:
        """Says that a part of the reasoning is whole: one that follows begins a line."""
        self._reasoning.drop_waiting()
        if self._reasoning.has_text:
            self._reasoning.waiting = ["\n"]
        self._ends_in_reasoning = False
        self._skips_space = not self._content.has_text

    def probe(self) -> ReplySink:
        """Returns a sink with these tools that nothing was told yet."""
        return ReplySink(self.tools, self._call_id, trims=self._trims, is_eager=False)

    def may_be_tool(self, name: str) -> bool:
        """Tells whether the name, which may be cut off, begins that of an offered tool."""
        return any(tool.startswith(name) for tool in self.tools)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Takes the name of a call, which must be that of an offered tool, and the id that the
        model gives it."""
        if name not in self.tools:
            raise Malformed
        index = self._num_calls + len(self._waiting)
        if call_id is None or call_id in self._ids:
            call_id = self._call_id(index)
        self._call = ToolCallDelta(index=index, id=call_id, name=name)
        if self._is_eager:
            self._tell(self._call)

    def arguments(self, text: str) -> None:
        """Takes a part of the call's arguments."""
        if not self._is_eager:
            self._arguments.append(text)
        elif text:
            self._calls.append(ToolCallDelta(index=self._num_calls - 1, arguments=text))

    def end_call(self) -> None:
        """Says that the call is whole; it is told when `tell_calls` says that its list is."""
        assert self._call is not None
        if not self._is_eager:
            arguments = without_repeated_keys("".join(self._arguments))
            self._waiting.append(msgspec.structs.replace(self._call, arguments=arguments))
        self._call = None
        self._arguments = []

    def tell_calls(self) -> None:
        """Tells the whole calls."""
        for call in self._waiting:
            self._tell(call)
        self.forget_calls()

    def forget_calls(self) -> None:
        """Says that what was being read is no call."""
        self._call = None
        self._arguments = []
        self._waiting = []

    def drop_calls(self) -> None:
        """Says that the text has ended inside a call: what separates it from content goes too."""
        self.forget_calls()
        self._separate()

    def _tell(self, call: ToolCallDelta) -> None:
        assert call.id is not None
        self._separate()
        self._ids.add(call.id)
        self._calls.append(call)
        self._num_calls += 1
        self._has_call = True

    def _separate(self) -> None:
        if self._trims or not self._content.has_text:
            self._content.drop_waiting()
        self._content.give_waiting()
        self._content.has_text = False

    def end(self) -> None:
        """Says that the text has ended."""
        if self._has_call and not self._content.has_text:
            self._content.drop_waiting()
        self._content.give_waiting()
        if self._ends_in_reasoning:
            self._reasoning.give_waiting()

    def take(self) -> ReplyDelta:
        """Returns what was found since the last call."""
        calls = _merged(self._calls)
        self._calls = []
        return ReplyDelta(
            content=self._content.take(), reasoning=self._reasoning.take(), tool_calls=calls
        )


def _merged(calls: list[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Returns the deltas with one for each call."""
    merged: list[ToolCallDelta] = []
    for index, parts in itertools.groupby(calls, key=lambda call: call.index):
        first, *rest = parts
        arguments = "".join([first.arguments, *(part.arguments for part in rest)])
        merged.append(ToolCallDelta(index=index, id=first.id, name=first.name, arguments=arguments))
    return tuple(merged)
