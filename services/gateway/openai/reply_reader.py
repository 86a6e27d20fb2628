"""What the deltas of one stream say, in order. Knows no form of an answer."""

from __future__ import annotations

from msgspec.structs import replace

from shardline.contract.chat import ReplyDelta
from shardline.contract.wire import Delta
from shardline_server.replies import ReplyParser

NOTHING = ReplyDelta()


class ReplyReader:
    """Reads the text of a stream as a reply; without a parser all of it is content."""

    def __init__(self, parser: ReplyParser | None, *, with_reasoning: bool = True) -> None:
        self._parser = parser
        self._with_reasoning = with_reasoning
        self.has_calls = False
        """Whether a call was told."""

    def read(self, delta: Delta) -> ReplyDelta:
        """Returns what this delta's text settles; the last one settles all."""
        if self._parser is None:
            return ReplyDelta(content=delta.text)
        said = self._parser.push(delta.text)
        if delta.state is not None:
            rest = self._parser.end()
            said = ReplyDelta(
                content=said.content + rest.content,
                reasoning=said.reasoning + rest.reasoning,
                tool_calls=said.tool_calls + rest.tool_calls,
            )
        self.has_calls = self.has_calls or bool(said.tool_calls)
        return said if self._with_reasoning else replace(said, reasoning="")
