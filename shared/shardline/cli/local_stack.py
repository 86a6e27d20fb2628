"""The stack that `make up` runs on this machine, for commands without a named server. Knows no
command."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from shardline.base.config import ENV_PREFIX, Settings

SERVERS = ("database", "redis")
HOME = ".local"
UP_FILE = "up.json"


class UpFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the commands need of up.json, which a supervisor writes while its stack is ready."""

    urls: dict[str, str]
    api_key: str = ""


class LocalGateway(msgspec.Struct, frozen=True, kw_only=True):
    """Where the stack on this machine answers, and with which key."""

    url: str
    api_key: str
    database: str


def local_gateway(folder: Path) -> LocalGateway | None:
    """The gateway of the stack in SHARDLINE_HOME, or in `.local` of a folder or the nearest one
    above it."""
    path = _up_file(folder)
    if path is None:
        return None
    up = msgspec.json.decode(path.read_bytes(), type=UpFile)
    return LocalGateway(url=up.urls["gateway"], api_key=up.api_key, database=up.urls["database"])


def use_local_stack(folder: Path) -> None:
    """Sets SHARDLINE_DATABASE_URL and SHARDLINE_REDIS_URL of this process to those of the stack in
    SHARDLINE_HOME, or in `.local` of a folder or the nearest one above it. Where either is set
    nothing changes: two installations are never mixed."""
    names = {server: f"{ENV_PREFIX}{server.upper()}_URL" for server in SERVERS}
    if any(map(_is_set, names.values())):
        return
    path = _up_file(folder)
    if path is not None:
        urls = msgspec.json.decode(path.read_bytes(), type=UpFile).urls
        os.environ.update({names[server]: urls[server] for server in SERVERS})


def named_database() -> str | None:
    """The database that the environment names, this process's own `use_local_stack` included."""
    if not _is_set(f"{ENV_PREFIX}DATABASE_URL"):
        return None
    return Settings().database_url.get_secret_value()


def _is_set(name: str) -> bool:
    return bool(os.environ.get(name) or os.environ.get(f"{name}_FILE"))


def _up_file(folder: Path) -> Path | None:
    home = os.environ.get(f"{ENV_PREFIX}HOME")
    homes = [Path(home)] if home else [each / HOME for each in (folder, *folder.parents)]
    return next((each / UP_FILE for each in homes if (each / UP_FILE).is_file()), None)
