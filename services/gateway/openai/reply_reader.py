"""Reads the deltas of one stream as a reply. Knows no form of an answer."""

from __future__ import annotations

from shardline.contract.chat import ReplyDelta
from shardline.contract.wire import Delta
from shardline_server.replies import ReplyParser, merged

NOTHING = ReplyDelta()


class ReplyReader:
    """Reads the text of a stream as a reply; without a parser all of it is content."""

    def __init__(self, parser: ReplyParser | None, *, with_reasoning: bool = True) -> None:
        self._parser = parser
        self._with_reasoning = with_reasoning
        self.has_calls = False
        """Whether a call has come."""

    def read(self, delta: Delta) -> ReplyDelta:
        """Returns what this delta's text settles; the last one settles all."""
        if self._parser is None:
            return ReplyDelta(content=delta.text)
        return merged(self.parts(delta.text, is_last=delta.state is not None))

    def parts(self, text: str, *, is_last: bool) -> list[ReplyDelta]:
        """Returns what this text settles, in order: each delta has one kind. Needs a parser."""
        assert self._parser is not None
        found = self._parser.push_parts(text)
        if is_last:
            found += self._parser.end_parts()
        self.has_calls = self.has_calls or any(part.tool_calls for part in found)
        return [part for part in found if self._with_reasoning or not part.reasoning]
