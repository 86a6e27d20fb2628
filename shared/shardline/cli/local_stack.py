"""The stack that `make up` runs on this machine, for commands without a named server. Knows no
command."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from shardline.base.config import ENV_PREFIX, Settings
from shardline.base.errors import Invalid

SERVERS = ("database", "redis")
HOME = ".local"
UP_FILE = "up.json"


class StackUrls(msgspec.Struct, frozen=True, kw_only=True):
    """The URLs of a stack and its servers."""

    database: str
    redis: str
    gateway: str


class UpFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the commands need of up.json, which a supervisor writes while its stack is ready."""

    urls: StackUrls
    api_key: str = ""


class LocalGateway(msgspec.Struct, frozen=True, kw_only=True):
    """The URL of the stack on this machine, and its API key."""

    url: str
    api_key: str
    database: str


def local_gateway(folder: Path) -> LocalGateway | None:
    """The gateway of the stack in SHARDLINE_HOME, or in `.local` of a folder or the nearest one
    above it. Raises Invalid for a damaged up.json."""
    up = _read_up_file(folder)
    if up is None:
        return None
    return LocalGateway(url=up.urls.gateway, api_key=up.api_key, database=up.urls.database)


def use_local_stack(folder: Path) -> None:
    """Sets SHARDLINE_DATABASE_URL and SHARDLINE_REDIS_URL of this process to those of the stack in
    SHARDLINE_HOME, or in `.local` of a folder or the nearest one above it. Where either is set
    nothing changes: two installations are never mixed. Raises Invalid for a damaged up.json."""
    names = {server: f"{ENV_PREFIX}{server.upper()}_URL" for server in SERVERS}
    if any(map(_is_set, names.values())):
        return
    up = _read_up_file(folder)
    if up is not None:
        os.environ.update({names[server]: getattr(up.urls, server) for server in SERVERS})


def named_database() -> str | None:
    """The database that the environment names, this process's own `use_local_stack` included."""
    if not _is_set(f"{ENV_PREFIX}DATABASE_URL"):
        return None
    return Settings().database_url.get_secret_value()


def _is_set(name: str) -> bool:
    return bool(os.environ.get(name) or os.environ.get(f"{name}_FILE"))


def _read_up_file(folder: Path) -> UpFile | None:
    path = _up_file(folder)
    if path is None:
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=UpFile)
    except ValueError as error:
        problem = "it is damaged, so the stack of this folder is unknown"
        remedy = "Run `make down`, then `make up`; or set SHARDLINE_DATABASE_URL and _REDIS_URL"
        raise Invalid(str(path), problem, remedy) from error


def _up_file(folder: Path) -> Path | None:
    home = os.environ.get(f"{ENV_PREFIX}HOME")
    homes = [Path(home)] if home else [each / HOME for each in (folder, *folder.parents)]
    return next((each / UP_FILE for each in homes if (each / UP_FILE).is_file()), None)
