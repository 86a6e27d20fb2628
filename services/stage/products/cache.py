"""Caches small results that are slow to compute on disk, for the next start. Knows nothing of what
they mean.

A cache that cannot be read or written costs time, never a start.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)


def recall(folder: Path, name: str) -> str | None:
    """Returns the value stored under this name, or None if there is none or it cannot be read."""
    try:
        return (folder / name).read_text(encoding="ascii")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        log.warning("cache is not readable", path=str(folder / name), reason=str(error))
        return None


def store(folder: Path, name: str, value: str) -> None:
    """Stores a value atomically: stages that start together never read half of it. A failure is
    logged."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="ascii") as draft:
            draft.write(value)
        Path(draft.name).replace(folder / name)
    except OSError as error:
        log.warning("cache is not writable", path=str(folder / name), reason=error.strerror)
