"""What a parser has found, as deltas. White space that only separates the parts of a reply is left
out; what is left out depends on the text alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import msgspec

from shardline.contract.chat import FunctionDefinition, ReplyDelta, ToolCallDelta
from shardline_server.replies.json_text import without_repeated_keys
from shardline_server.replies.text_source import MalformedCall


class _Prose:
    """Content or reasoning, as parts with the field `kind`: white space waits until text follows
    it."""

    __slots__ = ("_kind", "_parts", "has_text", "waiting")

    def __init__(self, kind: str, parts: list[ReplyDelta]) -> None:
        self._kind = kind
        self._parts = parts
        self.waiting: list[str] = []
        self.has_text = False
        """Whether anything but white space has been given since the part began."""

    def add(self, text: str) -> None:
        """Appends text."""
        end = len(text.rstrip())
        if end:
            self.give_waiting()
            self._give(text[:end])
            self.has_text = True
        if end < len(text):
            self.waiting.append(text[end:])

    def drop_waiting(self) -> None:
        """Forgets the white space at the end."""
        self.waiting = []

    def give_waiting(self) -> None:
        """Gives the white space at the end."""
        for text in self.waiting:
            self._give(text)
        self.waiting = []

    def _give(self, text: str) -> None:
        is_content = self._kind == "content"
        part = ReplyDelta(content=text) if is_content else ReplyDelta(reasoning=text)
        self._parts.append(part)


class ReplySink:
    """Takes what a parser finds and gives it out as deltas."""

    __slots__ = (
        "_arguments",
        "_call",
        "_call_id",
        "_content",
        "_ends_in_reasoning",
        "_has_call",
        "_ids",
        "_is_eager",
        "_num_calls",
        "_parts",
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
        """Whether calls are given out before they are whole."""
        self._parts: list[ReplyDelta] = []
        """What was found since the last `take`, in the order of the text; each has one field."""
        self._content = _Prose("content", self._parts)
        self._skips_space = False
        """Whether the white space that comes next only follows the reasoning."""
        self._reasoning = _Prose("reasoning", self._parts)
        self._ends_in_reasoning = False
        self._num_calls = 0
        self._ids: set[str] = set()
        self._call: ToolCallDelta | None = None
        """The call that is being read, without its arguments."""
        self._arguments: list[str] = []
        self._waiting: list[ToolCallDelta] = []
        """Whole calls of a list that is not whole."""
        self._has_call = False
        """Whether a call was the last thing found."""

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
        """Ends the reasoning."""
        self._reasoning.drop_waiting()
        self._ends_in_reasoning = False
        self._skips_space = not self._content.has_text

    def end_part_of_reasoning(self) -> None:
        """Ends a part of the reasoning: one that follows begins a line."""
        self._reasoning.drop_waiting()
        if self._reasoning.has_text:
            self._reasoning.waiting = ["\n"]
        self._ends_in_reasoning = False
        self._skips_space = not self._content.has_text

    def probe(self) -> ReplySink:
        """Returns a sink with these tools that has taken nothing yet."""
        return ReplySink(self.tools, self._call_id, trims=self._trims, is_eager=False)

    def may_be_tool(self, name: str) -> bool:
        """Tells whether the name, which may be cut off, begins that of an offered tool."""
        return any(tool.startswith(name) for tool in self.tools)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Takes the name of a call, which must be that of an offered tool, and the id that the
        model gives it."""
        if name not in self.tools:
            raise MalformedCall
        index = self._num_calls + len(self._waiting)
        if call_id is None or call_id in self._ids:
            call_id = self._call_id(index)
        self._call = ToolCallDelta(index=index, id=call_id, name=name)
        if self._is_eager:
            self._give_call(self._call)

    def arguments(self, text: str) -> None:
        """Takes a part of the call's arguments."""
        if not self._is_eager:
            self._arguments.append(text)
        elif text:
            self._add_call(ToolCallDelta(index=self._num_calls - 1, arguments=text))

    def end_call(self) -> None:
        """Ends the call; `give_calls` gives it out when its list has ended."""
        assert self._call is not None
        if not self._is_eager:
            arguments = without_repeated_keys("".join(self._arguments))
            self._waiting.append(msgspec.structs.replace(self._call, arguments=arguments))
        self._call = None
        self._arguments = []

    def give_calls(self) -> None:
        """Gives out the whole calls."""
        for call in self._waiting:
            self._give_call(call)
        self.forget_calls()

    def forget_calls(self) -> None:
        """Discards what was being read: it is no call."""
        self._call = None
        self._arguments = []
        self._waiting = []

    def drop_calls(self) -> None:
        """Discards a call that the end of the text cuts off, with its separator from content."""
        self.forget_calls()
        self._separate()

    def _give_call(self, call: ToolCallDelta) -> None:
        assert call.id is not None
        self._separate()
        self._ids.add(call.id)
        self._add_call(call)
        self._num_calls += 1
        self._has_call = True

    def _add_call(self, call: ToolCallDelta) -> None:
        self._parts.append(ReplyDelta(tool_calls=(call,)))

    def _separate(self) -> None:
        if self._trims or not self._content.has_text:
            self._content.drop_waiting()
        self._content.give_waiting()
        self._content.has_text = False

    def end(self) -> None:
        """Ends the text."""
        if self._has_call and not self._content.has_text:
            self._content.drop_waiting()
        self._content.give_waiting()
        if self._ends_in_reasoning:
            self._reasoning.give_waiting()

    def take(self) -> list[ReplyDelta]:
        """Returns what was found since the last call, in the order of the text; neighbors differ in
        their kind."""
        found = [merged(parts) for _, parts in itertools.groupby(self._parts, key=_kind)]
        self._parts.clear()
        return found


def merged(parts: Iterable[ReplyDelta]) -> ReplyDelta:
    """Returns one delta with all that these have; what came in which order is lost."""
    parts = tuple(parts)
    return ReplyDelta(
        content="".join(part.content for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        tool_calls=_merged_calls(call for part in parts for call in part.tool_calls),
    )


def _kind(part: ReplyDelta) -> str:
    return "content" if part.content else "reasoning" if part.reasoning else "call"


def _merged_calls(calls: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Returns the deltas with one for each call."""
    found: list[ToolCallDelta] = []
    for index, parts in itertools.groupby(calls, key=lambda call: call.index):
        first, *rest = parts
        arguments = "".join([first.arguments, *(part.arguments for part in rest)])
        found.append(ToolCallDelta(index=index, id=first.id, name=first.name, arguments=arguments))
    return tuple(found)
