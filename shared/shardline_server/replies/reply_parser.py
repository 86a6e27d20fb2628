"""Makes a reply of the text of a completion, as it comes or at once."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from shardline.contract.chat import (
    FunctionCall,
    Reply,
    ReplyDelta,
    Tool,
    ToolCall,
)
from shardline_server.replies.families import family as family_named
from shardline_server.replies.reply_sink import ReplySink, merged
from shardline_server.replies.text_source import TextSource


class ReplyParser:
    """Takes the text of one completion, special tokens of the family included, and gives its reply
    in deltas. These, joined, depend on the text and on the arguments alone, not on where the text
    was cut. No text is an error."""

    __slots__ = ("_sink", "_source", "_steps")

    def __init__(
        self,
        family: str,
        *,
        job_id: uuid.UUID,
        tools: Sequence[Tool] = (),
        prompt_end: str = "",
        tells_early: bool = False,
    ) -> None:
        """`family` is a name of FAMILIES (Invalid if not). Only calls of `tools` are calls; ids are
        made of `job_id` and a call's index. `prompt_end` is the end of the prompt as the template
        has rendered it, from the last message on: it may begin the reasoning.

        A call comes when it is whole and valid; one that the text cuts off never comes. With
        `tells_early` a call begins as soon as its name is known, and its arguments come as the
        model writes them; then one that is cut off or damaged stays in the reply, as far as it
        came, and the text of a damaged one is content, too."""
        chosen = family_named(family)
        self._source = TextSource()
        self._sink = ReplySink(
            {tool.function.name: tool.function for tool in tools},
            lambda index: chosen.call_id(job_id, index),
            trims=chosen.trims,
            is_eager=tells_early,
        )
        self._steps = chosen.read(self._source, self._sink, prompt_end)
        next(self._steps, None)

    def push(self, text: str) -> ReplyDelta:
        """Takes the next text and returns what it settles."""
        return merged(self.push_parts(text))

    def end(self) -> ReplyDelta:
        """Ends the text, for any reason, and returns the last delta."""
        return merged(self.end_parts())

    def push_parts(self, text: str) -> list[ReplyDelta]:
        """Takes the next text and returns what it settles, in order: each delta has one kind."""
        self._source.push(text)
        next(self._steps, None)
        return self._sink.take()

    def end_parts(self) -> list[ReplyDelta]:
        """Ends the text, as `end` does, and returns the last parts in order."""
        self._source.close()
        next(self._steps, None)
        self._sink.end()
        return self._sink.take()


def parse(
    text: str,
    family: str,
    *,
    job_id: uuid.UUID,
    tools: Sequence[Tool] = (),
    prompt_end: str = "",
    tells_early: bool = False,
) -> Reply:
    """Returns the reply that a whole text is; arguments as those of ReplyParser."""
    parser = ReplyParser(
        family, job_id=job_id, tools=tools, prompt_end=prompt_end, tells_early=tells_early
    )
    return joined((parser.push(text), parser.end()))


def joined(deltas: Iterable[ReplyDelta]) -> Reply:
    """Returns the reply of which these are the deltas, from its first one on."""
    content: list[str] = []
    reasoning: list[str] = []
    heads: list[tuple[str, str]] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        content.append(delta.content)
        reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.id is not None and call.name is not None:
                heads.append((call.id, call.name))
                arguments.append([])
            arguments[call.index].append(call.arguments)
    return Reply(
        content="".join(content),
        reasoning="".join(reasoning) or None,
        tool_calls=tuple(
            ToolCall(id=call_id, function=FunctionCall(name=name, arguments="".join(parts)))
            for (call_id, name), parts in zip(heads, arguments, strict=True)
        ),
    )
