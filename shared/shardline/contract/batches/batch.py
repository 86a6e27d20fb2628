"""The batch: a file of requests, each of which becomes jobs, and the states that it passes.
Knows no database and no door."""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from typing import Literal, get_args
from uuid import UUID

import msgspec

from shardline.base.errors import Invalid
from shardline.contract.ids import as_id

Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/decisions",
]
ENDPOINTS: tuple[str, ...] = get_args(Endpoint)

PURPOSE = "batch"
"""Of the file that a batch is made of."""

FILE_PREFIX = "file-"
"""Before the UUID of a file, as clients name it."""

CHUNK_BYTES = 1 << 20
"""Of a file's content, in a separate row."""

MAX_LINES = 50_000
MAX_LINE_NUMBER = (1 << 20) - 1
"""Blank lines are counted too."""

PREFIX = "batch_"
"""Before the UUID of a batch, as clients name it."""
BATCH_ID = rf"^({PREFIX})?[0-9a-f]{{8}}(-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}$"
"""A pattern: UUIDs do without the prefix."""

WINDOW = r"^[1-9][0-9]{0,3}[mhd]$"
UNITS_S = {"m": 60.0, "h": 3_600.0, "d": 86_400.0}
MAX_WINDOW_S = 30 * UNITS_S["d"]

_VERSION_8 = 0x8 << 76
_VARIANT = 0x2 << 62


class BatchStatus(StrEnum):
    """validating → failed | in_progress → finalizing → completed | expired, and with a cancel
    cancelling → cancelled. OpenAI's."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OPEN = (
    BatchStatus.VALIDATING,
    BatchStatus.IN_PROGRESS,
    BatchStatus.FINALIZING,
    BatchStatus.CANCELLING,
)


class LineCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many lines of a batch have ended, and how, with the tokens of those that succeeded."""

    completed: int = 0
    failed: int = 0
    expired: int = 0
    """Of the failed ones."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


def window_seconds(window: str) -> float:
    """Reads a batch's window, as 24h. Raises Invalid."""
    remedy = "Send 24h, or another one"
    if re.fullmatch(WINDOW, window) is None:
        raise Invalid("completion_window", f"{window[:16]!r} is no number with m, h or d", remedy)
    seconds = int(window[:-1]) * UNITS_S[window[-1]]
    if seconds > MAX_WINDOW_S:
        raise Invalid("completion_window", "it is over 30d", remedy)
    return seconds


def line_id(batch_id: UUID | str, line: int, choice: int = 0) -> UUID:
    """Returns the id of a line's job, or of a further choice. It begins with the batch's time, so
    that ids sort as lines do, and is the same when a line is inserted again."""
    batch = as_id(batch_id)
    digest = hashlib.blake2b(batch.bytes, digest_size=6).digest()
    random = int.from_bytes(digest, "big") >> 6
    return UUID(
        int=((batch.int >> 80) << 80)
        | _VERSION_8
        | ((random >> 30) << 64)
        | _VARIANT
        | ((random & ((1 << 30) - 1)) << 32)
        | (line << 12)
        | choice
    )
