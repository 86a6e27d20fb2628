"""Models without calls and reasoning that we know: all text is content."""

from __future__ import annotations

from shardline_server.replies.reply_sink import ReplySink
from shardline_server.replies.text_source import Steps, TextSource


def read(source: TextSource, sink: ReplySink, _prompt_end: str) -> Steps[None]:
    """Reads a reply."""
    yield from source.rest(sink.content)
