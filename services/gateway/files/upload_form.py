"""A form with a file, read as it comes: python-multipart splits it, and this bounds what it gives.
Knows no server."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from shardline.base.errors import Invalid

FORM = "multipart/form-data"
FILE = "file"
MAX_PARTS = 8
MAX_HEADER_BYTES = 4 << 10
MAX_FIELD_BYTES = 1 << 10
MAX_BOUNDARY_BYTES = 256
REMEDY = "Send multipart/form-data with file and purpose"

ENCODED_NAME = re.compile(rb"filename\*=utf-8'[^']*'([^;\s]+)", re.IGNORECASE)
"""Of RFC 5987. RFC 7578 forbids it in forms, and .NET sends it together with a plain name."""


def boundary_of(content_type: str) -> bytes | None:
    """Returns the boundary of a form's parts; None of what is no such form."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    is_form = kind.lower() == FORM.encode() and boundary
    return boundary if is_form and len(boundary or b"") <= MAX_BOUNDARY_BYTES else None


class UploadForm:
    """The fields of a form, and what of its file has come and was not taken yet. Raises Invalid."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """None until the file begins."""
        self.content = bytearray()
        self.is_whole = False
        self._num_parts = 0
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._disposition = b""
        self._num_header_bytes = 0
        self._name = ""
        self._value: bytearray | None = None
        callbacks: Any = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._on_header_name,
            "on_header_value": self._on_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_content,
            "on_part_data": self._on_content,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except FormParserError as error:
            raise _malformed(error) from error

    def push(self, data: bytes) -> None:
        """Reads the next bytes of the form."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(error) from error

    def take(self, num_bytes: int) -> bytes:
        """Returns the first bytes of what has come of the file, and forgets them."""
        taken = bytes(self.content[:num_bytes])
        del self.content[:num_bytes]
        return taken

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise Invalid("body", f"the form has more than {MAX_PARTS} parts", REMEDY)
        self._disposition = b""
        self._num_header_bytes = 0
        self._header = (bytearray(), bytearray())

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header[0].extend(data[start:end])

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header[1].extend(data[start:end])

    def _count_header(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            problem = f"the headers of a part are over {MAX_HEADER_BYTES} bytes"
            raise Invalid("body", problem, REMEDY)

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = bytes(value)
        self._header = (bytearray(), bytearray())

    def _begin_content(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == FILE:
            if self.filename is not None:
                raise Invalid(FILE, "the form has it twice", "Send one file in a request")
            encoded = ENCODED_NAME.search(self._disposition)
            name = unquote_to_bytes(encoded[1]) if encoded else options.get(b"filename", b"file")
            self.filename = name.decode("utf-8", "replace")
            self._value = None
        elif not self._name or self._name in self.fields:
            problem = "a part has no name" if not self._name else "the form has it twice"
            raise Invalid(self._name[:64] or "body", problem, REMEDY)
        else:
            self._value = bytearray()

    def _on_content(self, data: bytes, start: int, end: int) -> None:
        target = self.content if self._value is None else self._value
        target += data[start:end]
        if self._value is not None and len(self._value) > MAX_FIELD_BYTES:
            problem = f"it is over {MAX_FIELD_BYTES} bytes"
            raise Invalid(self._name[:64], problem, "Send less")

    def _end_part(self) -> None:
        if self._value is None:
            return
        try:
            self.fields[self._name] = self._value.decode()
        except UnicodeDecodeError as error:
            raise Invalid(self._name[:64], "it is not UTF-8", "Send text") from error

    def _end(self) -> None:
        self.is_whole = True


def _malformed(error: Exception) -> Invalid:
    return Invalid("body", f"it is no form: {str(error)[:128]}", REMEDY)
