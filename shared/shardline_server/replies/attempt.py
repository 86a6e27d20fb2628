"""A call, or a list of them, that is tried: it is given out if the text has it whole, and is
content if it is none."""

from __future__ import annotations

import re

from shardline_server.replies.reply_sink import ReplySink
from shardline_server.replies.text_source import CutOff, MalformedCall, Steps, TextSource

_NAME = re.compile(r"[A-Za-z0-9_.-]*")


def attempt(source: TextSource, sink: ReplySink, marker: str, body: Steps[None]) -> Steps[bool]:
    """Reads calls with `body`, behind their marker; returns whether there are any. The text of
    malformed ones becomes content. Behind a marker, what the end of the text cuts off is neither:
    half a call is no answer, and after its marker it is no content."""
    source.begin_call(marker)
    try:
        yield from body
    except MalformedCall:
        sink.forget_calls()
        sink.content(source.end_call())
        return False
    except CutOff:
        source.read_rest()
        text = source.end_call()
        if marker:
            sink.drop_calls()
        else:
            sink.forget_calls()
            sink.content(text)
        return False
    source.end_call()
    sink.give_calls()
    return True


def read_name(source: TextSource, sink: ReplySink) -> Steps[str]:
    """Reads the name of a function."""
    name = yield from source.run_of(_NAME)
    if not (yield from source.peek()):
        raise CutOff if sink.may_be_tool(name) else MalformedCall
    return name
