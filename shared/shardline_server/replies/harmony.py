"""gpt-oss: messages with a channel and, if they are calls, a recipient."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from shardline_server.replies.attempt import attempt
from shardline_server.replies.json_call import read_arguments
from shardline_server.replies.reply_sink import ReplySink
from shardline_server.replies.text_source import MarkerSet, Steps, TextSource

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)

_ENDS_OF_HEADER = MarkerSet(MESSAGE, START, *ENDS)
_ENDS_OF_BODY = MarkerSet(f"{START}assistant", *ENDS)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_WELL_FORMED = re.compile(
    r"\s*(assistant)?\s*(to=[^\s<]*)?\s*(<\|channel\|>)?\w*\s*(to=[^\s<]*)?\s*"
    r"(<\|constrain\|>)?\w*\s*"
)
_FUNCTIONS = "functions."

MAX_HEADER_CHARS = 300
"""Names of functions have at most 64 characters; longer text before a message is no header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    channel: str
    recipient: str

    @classmethod
    def of(cls, text: str) -> _Header:
        """Reads the text before a message."""
        channels = _CHANNEL.findall(text)
        recipients = [name for name in _RECIPIENT.findall(text) if name != "assistant"]
        return cls(
            channel=channels[-1] if channels else "final",
            recipient=recipients[-1] if recipients else "",
        )


def read(source: TextSource, sink: ReplySink, prompt_end: str) -> Steps[None]:
    """Reads a reply."""
    before = prompt_end.rpartition(START)[2]
    if MESSAGE in before:
        yield from _read_body(source, sink, _Header.of(before.partition(MESSAGE)[0]))
        before = ""
    while (yield from source.peek()):
        yield from _read_message(source, sink, before)
        before = ""


def _read_message(source: TextSource, sink: ReplySink, before: str) -> Steps[None]:
    space = yield from source.space()
    word = yield from source.accept(START, CHANNEL, CONSTRAIN, MESSAGE, "to=")
    if not word and CHANNEL not in before:
        # No header at all: the model has left out the format.
        sink.content(space)
        yield from _read_body(source, sink, _Header(channel="final", recipient=""))
        return
    parts = [before, space, word]
    marker: str | None = word
    while marker not in {MESSAGE, *ENDS}:
        marker = yield from source.until(_ENDS_OF_HEADER, parts.append)
        if marker is None:
            _read_broken(sink, "".join(parts).removeprefix(START))
            return
        if marker == START:
            _read_broken(sink, "".join(parts).removeprefix(START))
            parts = []
    text = "".join(parts).removeprefix(START)
    if marker == MESSAGE:
        yield from _read_body(source, sink, _Header.of(text))
    else:
        _read_broken(sink, text)


def _read_broken(sink: ReplySink, text: str) -> None:
    """Takes a header without a message: nothing if it is a part of one, content if it is none."""
    if len(text) > MAX_HEADER_CHARS or not _WELL_FORMED.fullmatch(text):
        sink.content(text.rpartition(CHANNEL)[2])


def _read_body(source: TextSource, sink: ReplySink, header: _Header) -> Steps[None]:
    name = header.recipient.removeprefix(_FUNCTIONS)
    if name in sink.tools:
        yield from attempt(source, sink, MESSAGE, _read_call(source, sink, name))
        yield from _read_text(source, sink.content)
    elif header.recipient:
        # A message to a tool that was not offered is dropped.
        yield from _read_text(source, _forget)
    elif header.channel == "analysis":
        yield from _read_text(source, sink.reasoning)
        sink.end_part_of_reasoning()
    else:
        yield from _read_text(source, sink.content)


def _forget(_text: str) -> None:
    return None


def _read_call(source: TextSource, sink: ReplySink, name: str) -> Steps[None]:
    sink.begin_call(name)
    if (yield from source.follows(*ENDS)):
        sink.arguments("{}")
    else:
        yield from read_arguments(source, sink)
    sink.end_call()


def _read_text(source: TextSource, give: Callable[[str], object]) -> Steps[None]:
    """Reads the text of a message. What looks like its end is one if a message or nothing
    follows."""
    while marker := (yield from source.until(_ENDS_OF_BODY, give)):
        if marker not in ENDS or (yield from source.follows(START, at_end=True)):
            return
        give(marker)
