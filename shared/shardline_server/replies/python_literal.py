"""Literals of Python, as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from shardline_server.replies.json_text import text_of
from shardline_server.replies.text_source import (
    CutOff,
    MalformedCall,
    Steps,
    TextSource,
    steps_taken,
)

MAX_DEPTH = 64

_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in ("'", '"')}
_WORD = re.compile(r"[-+.0-9A-Za-z_]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+")


def read_literal(source: TextSource, give: Callable[[str], object], depth: int = 0) -> Steps[None]:
    """Reads one literal behind white space and gives it as JSON, in pieces."""
    if depth > MAX_DEPTH:
        raise MalformedCall
    char = yield from source.need()
    if char in _PLAIN:
        text = yield from read_string(source)
        give(text_of(text))
    elif char in "[(":
        yield from source.expect(char)
        yield from _read_items(source, give, "]" if char == "[" else ")", depth)
    elif char == "{":
        yield from source.expect(char)
        yield from _read_pairs(source, give, depth)
    else:
        give((yield from _read_word(source)))


def _read_word(source: TextSource) -> Steps[str]:
    word = yield from source.run_of(_WORD)
    if not (yield from source.peek()):
        raise CutOff
    if word in _WORDS:
        return _WORDS[word]
    number = word.replace("_", "").removeprefix("+")
    if not _NUMBER.fullmatch(number):
        raise MalformedCall
    return number


def read_string(source: TextSource) -> Steps[str]:
    """Reads a string and returns what it means."""
    quote = yield from source.expect(*_PLAIN)
    parts: list[str] = []
    while True:
        parts.append((yield from source.run_of(_PLAIN[quote])))
        if (yield from source.need_char()) == quote:
            yield from source.expect(quote)
            return "".join(parts)
        yield from source.expect("\\")
        parts.append((yield from _read_escape(source)))


def _read_escape(source: TextSource) -> Steps[str]:
    char = yield from source.need_char()
    yield from source.expect(char)
    if char in _HEX_DIGITS:
        digits = ""
        while len(digits) < _HEX_DIGITS[char]:
            digit = yield from source.need_char()
            if not _HEX.fullmatch(digit):
                raise MalformedCall
            yield from source.expect(digit)
            digits += digit
        code = int(digits, 16)
        if code > 0x10FFFF:
            raise MalformedCall
        return chr(code)
    if char == "\n":
        return ""
    if char in "'\"\\":
        return char
    return _ESCAPES.get(char, f"\\{char}")


def _read_items(
    source: TextSource, give: Callable[[str], object], end: str, depth: int
) -> Steps[None]:
    give("[")
    word = ""
    while (yield from source.need()) != end:
        give(word)
        yield from read_literal(source, give, depth + 1)
        word = ", "
        if (yield from source.need()) != end:
            yield from source.expect(",")
    yield from source.expect(end)
    give("]")


def _read_pairs(source: TextSource, give: Callable[[str], object], depth: int) -> Steps[None]:
    give("{")
    word = ""
    while (yield from source.need()) != "}":
        key: list[str] = []
        yield from read_literal(source, key.append, depth + 1)
        text = "".join(key)
        if text[0] in "[{":
            raise MalformedCall
        give(word + (text if text[0] == '"' else json.dumps(text)) + ": ")
        yield from source.need()
        yield from source.expect(":")
        yield from read_literal(source, give, depth + 1)
        word = ", "
        if (yield from source.need()) != "}":
            yield from source.expect(",")
    yield from source.expect("}")
    give("}")


def json_of_literal(text: str) -> str | None:
    """Returns a whole literal as JSON; None if the text is none."""
    parts: list[str] = []
    source = TextSource.of(text)
    try:
        steps_taken(read_literal(source, parts.append))
    except (MalformedCall, CutOff):
        return None
    return None if steps_taken(source.peek()) else "".join(parts)
