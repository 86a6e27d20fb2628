"""Finds where a JSON value ends in text that comes in pieces, and refuses what is none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto

MAX_DEPTH = 200
"""Values that are nested deeper are refused: readers of JSON have limits too."""

MAX_WORD_CHARS = 400
"""Of a number: a double has at most 309 digits before its point."""

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{0,3})?")


class _Place(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


class JsonScanner:
    """Reads one value and gives its text, in pieces. Control characters in strings are escaped:
    models write line breaks there. Keeps the open brackets and a begun word, never the text."""

    __slots__ = (
        "_begun",
        "_give",
        "_in_string",
        "_is_key",
        "_open",
        "_place",
        "is_broken",
        "is_done",
    )

    def __init__(self, give: Callable[[str], object]) -> None:
        self._give = give
        self._open: list[str] = []
        self._place = _Place.VALUE
        self._in_string = False
        self._is_key = False
        self._begun = ""
        """A number, literal or escape sequence without its end."""
        self.is_broken = False
        self.is_done = False

    def scan(self, text: str, at: int) -> int:
        """Reads `text` from `at` on; returns where the value or the text ends, or, with
        `is_broken`, where it is no JSON."""
        while at < len(text) and not (self.is_done or self.is_broken):
            if self._in_string:
                at = self._scan_string(text, at)
            elif self._begun:
                at = self._scan_word(text, at)
            else:
                at = self._scan_token(text, at)
        return at

    def finish(self) -> bool:
        """Ends the text; returns whether the value is whole."""
        if self._begun and not self._open and not self._in_string:
            self._end_word()
        return self.is_done

    def _scan_string(self, text: str, at: int) -> int:
        if self._begun:
            return self._scan_escape(text, at)
        found = _PLAIN.match(text, at)
        assert found is not None
        if found.end() > at:
            self._give(found.group())
            return found.end()
        char = text[at]
        if char == "\\":
            self._begun = char
        elif char == '"':
            self._in_string = False
            self._give(char)
            self._place = _Place.COLON if self._is_key else _Place.COMMA_OR_END
            self._end_value()
        else:
            self._give(json.dumps(char)[1:-1])
        return at + 1

    def _scan_escape(self, text: str, at: int) -> int:
        self._begun += text[at]
        if _ESCAPE.fullmatch(self._begun):
            self._give(self._begun)
            self._begun = ""
        elif not _BEGUN_ESCAPE.fullmatch(self._begun):
            self.is_broken = True
        return at + 1

    def _scan_word(self, text: str, at: int) -> int:
        found = _WORD.match(text, at)
        assert found is not None
        self._begun = (self._begun + found.group())[: MAX_WORD_CHARS + 1]
        if found.end() < len(text):
            self.is_broken = not self._end_word()
        return found.end()

    def _end_word(self) -> bool:
        word = self._begun
        if len(word) > MAX_WORD_CHARS:
            return False
        if word not in {"true", "false", "null"} and not _NUMBER.fullmatch(word):
            return False
        self._begun = ""
        self._give(word)
        self._place = _Place.COMMA_OR_END
        self._end_value()
        return True

    def _end_value(self) -> None:
        self.is_done = not self._open

    def _scan_token(self, text: str, at: int) -> int:
        found = _SPACE.match(text, at)
        assert found is not None
        if found.end() > at:
            self._give(found.group())
            return found.end()
        char = text[at]
        if char == '"':
            is_taken = self._open_string()
        elif char in "{[":
            is_taken = self._open_bracket(char)
        elif char in "}]":
            is_taken = self._close_bracket(char)
        elif char in ",:":
            is_taken = self._separate(char)
        elif self._place in {_Place.VALUE, _Place.VALUE_OR_END} and _WORD.fullmatch(char):
            self._begun = char
            return at + 1
        else:
            is_taken = False
        if not is_taken:
            self.is_broken = True
            return at
        self._give(char)
        return at + 1

    def _open_string(self) -> bool:
        self._is_key = self._place in {_Place.KEY, _Place.KEY_OR_END}
        if not self._is_key and self._place not in {_Place.VALUE, _Place.VALUE_OR_END}:
            return False
        self._in_string = True
        return True

    def _open_bracket(self, char: str) -> bool:
        if self._place not in {_Place.VALUE, _Place.VALUE_OR_END} or len(self._open) == MAX_DEPTH:
            return False
        self._open.append("}" if char == "{" else "]")
        self._place = _Place.KEY_OR_END if char == "{" else _Place.VALUE_OR_END
        return True

    def _close_bracket(self, char: str) -> bool:
        may_end = {_Place.COMMA_OR_END, _Place.KEY_OR_END, _Place.VALUE_OR_END}
        if self._place not in may_end or not self._open or self._open[-1] != char:
            return False
        self._open.pop()
        self._place = _Place.COMMA_OR_END
        self._end_value()
        return True

    def _separate(self, char: str) -> bool:
        if char == ":" and self._place is _Place.COLON:
            self._place = _Place.VALUE
        elif char == "," and self._place is _Place.COMMA_OR_END and self._open:
            self._place = _Place.KEY if self._open[-1] == "}" else _Place.VALUE
        else:
            return False
        return True
