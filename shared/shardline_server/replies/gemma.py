"""Gemma 4: call:name{key:value} between <|tool_call> and <tool_call|>, with strings between <|"|>;
reasoning in a channel."""

from __future__ import annotations

import re
from collections.abc import Callable

from shardline_server.replies.argument_writer import json_of
from shardline_server.replies.attempt import attempt, read_name
from shardline_server.replies.json_text import text_of
from shardline_server.replies.reply_sink import ReplySink
from shardline_server.replies.text_source import CutOff, MalformedCall, MarkerSet, Steps, TextSource
from shardline_server.replies.thinking import is_open_in

CALL = "<|tool_call>"
END_CALL = "<tool_call|>"
CHANNEL = "<|channel>"
END_CHANNEL = "<channel|>"
QUOTE = '<|"|>'
MARKERS = (CALL, END_CALL, CHANNEL, END_CHANNEL, QUOTE)

MAX_DEPTH = 64

_PARTS = MarkerSet(CALL, CHANNEL)
_END_CHANNEL = MarkerSet(END_CHANNEL)
_QUOTE = MarkerSet(QUOTE)
_KEY = re.compile(r"[^:<{}\[\]]*")
_BARE = re.compile(r"[^,<{}\[\]]*")


def read(source: TextSource, sink: ReplySink, prompt_end: str) -> Steps[None]:
    """Reads a reply."""
    if is_open_in(prompt_end, CHANNEL, END_CHANNEL):
        yield from _read_channel(source, sink)
    while marker := (yield from source.until(_PARTS, sink.content)):
        if marker == CALL:
            yield from attempt(source, sink, CALL, _read_call(source, sink))
        else:
            yield from _read_channel(source, sink)


def _read_channel(source: TextSource, sink: ReplySink) -> Steps[None]:
    yield from source.accept("thought\n")
    if (yield from source.until(_END_CHANNEL, sink.reasoning)):
        sink.end_reasoning()


def _read_call(source: TextSource, sink: ReplySink) -> Steps[None]:
    yield from source.space()
    yield from source.expect("call:")
    name = yield from read_name(source, sink)
    sink.begin_call(name)
    if (yield from source.need()) != "{":
        raise MalformedCall
    yield from _read_value(source, sink.arguments, 0)
    sink.end_call()
    yield from source.space()
    if (yield from source.peek()):
        yield from source.expect(END_CALL)


def _read_value(source: TextSource, give: Callable[[str], object], depth: int) -> Steps[None]:
    if depth > MAX_DEPTH:
        raise MalformedCall
    char = yield from source.need()
    if char in "{[":
        yield from source.expect(char)
        yield from _read_members(source, give, char, depth)
    elif (yield from source.accept(QUOTE)):
        give(text_of((yield from _read_quoted(source))))
    else:
        word = (yield from source.run_of(_BARE)).strip()
        if not (yield from source.peek()):
            raise CutOff
        if not word:
            raise MalformedCall
        give(json_of(word) or text_of(word))


def _read_members(
    source: TextSource, give: Callable[[str], object], begin: str, depth: int
) -> Steps[None]:
    end = "}" if begin == "{" else "]"
    give(begin)
    word = ""
    while (yield from source.need()) != end:
        give(word)
        if begin == "{":
            key = yield from _read_key(source)
            give(f"{text_of(key)}: ")
        yield from _read_value(source, give, depth + 1)
        word = ", "
        if (yield from source.need()) != end:
            yield from source.expect(",")
    yield from source.expect(end)
    give(end)


def _read_key(source: TextSource) -> Steps[str]:
    if (yield from source.accept(QUOTE)):
        key = yield from _read_quoted(source)
        yield from source.space()
    else:
        key = (yield from source.run_of(_KEY)).strip().strip('"')
    yield from source.expect(":")
    return key


def _read_quoted(source: TextSource) -> Steps[str]:
    parts: list[str] = []
    if not (yield from source.until(_QUOTE, parts.append)):
        raise CutOff
    return "".join(parts)
