"""The first look at a batch's file: whether it is one, before any line becomes a job. Knows no
row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from services.gateway.batches.envelope import Envelope, read_envelope
from services.gateway.batches.input_lines import InputLine
from shardline.contract.batches.batch import MAX_LINE_NUMBER, MAX_LINES

MAX_ERRORS = 100
"""Of one batch, in its document."""


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a file is no batch. `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class FileCheck:
    """Reads all lines once, and keeps a digest of each custom_id. A line that is bad in itself is
    left to the file of errors."""

    def __init__(self, endpoint: str, *, max_line_bytes: int) -> None:
        self.num_lines = 0
        self.last_line = 0
        self.errors: list[BatchError] = []
        self._endpoint = endpoint
        self._max_line_bytes = max_line_bytes
        self._num_json = 0
        self._first_broken: BatchError | None = None
        self._ids: set[bytes] = set()
        self._models: set[Any] = set()

    def push(self, lines: Iterable[InputLine]) -> None:
        """Looks at the next lines."""
        for line in lines:
            self.num_lines += 1
            self.last_line = line.number
            if len(self.errors) < MAX_ERRORS and self.num_lines <= MAX_LINES:
                self._look(line, read_envelope(line, max_bytes=self._max_line_bytes))

    def end(self) -> None:
        """Looks at the file as a whole."""
        if self.num_lines == 0:
            self._fail("empty_file", "The file has no lines")
        elif self.num_lines > MAX_LINES or self.last_line > MAX_LINE_NUMBER:
            problem = f"The file has {self.num_lines} lines; {MAX_LINES} is the limit"
            self._fail("too_many_lines", problem)
        elif self._num_json == 0 and self._first_broken is not None:
            self.errors.append(self._first_broken)

    @property
    def model(self) -> str | None:
        """What all lines ask, as far as they name the same."""
        return next(iter(self._models)) if len(self._models) == 1 else None

    def _look(self, line: InputLine, envelope: Envelope) -> None:
        if not envelope.is_json and self._first_broken is None:
            message = str(envelope.error)
            self._first_broken = BatchError(
                code="invalid_json_line", message=message, line=line.number
            )
        self._num_json += envelope.is_json
        if envelope.url is not None and envelope.url != self._endpoint:
            problem = f"The url is not the batch's endpoint {self._endpoint}"
            self._fail("mismatched_url", problem, param="url", line=line.number)
        if envelope.custom_id is not None:
            digest = hashlib.blake2b(envelope.custom_id.encode(), digest_size=16).digest()
            if digest in self._ids:
                problem = f"The custom_id {envelope.custom_id[:64]!r} is not the first of its kind"
                self._fail("duplicate_custom_id", problem, param="custom_id", line=line.number)
            self._ids.add(digest)
        if envelope.error is None and len(self._models) < 2:
            self._models.add(_model(envelope.body))

    def _fail(
        self, code: str, message: str, *, param: str | None = None, line: int | None = None
    ) -> None:
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(BatchError(code=code, message=message, param=param, line=line))


class ModelName(msgspec.Struct):
    """The one field of a request that the document of its batch has."""

    model: str | None = None


def _model(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=ModelName).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
