"""Parts of API keys."""

from __future__ import annotations

from shardline.contract.api_key import PREFIX


def secret_of(key: str) -> str:
    """Returns what is behind a key's id; it may hold dashes."""
    return key.removeprefix(PREFIX).partition("-")[2]
