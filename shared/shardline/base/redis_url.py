"""The address of Redis: one URL, parsed once, in the words of redis-py and in those of Celery.
Imports neither.

The two libraries read URLs apart: kombu verifies no certificate where redis-py does, and drops or
mistakes options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from shardline.base.errors import Invalid

DEFAULT_PORT = 6379
TCP = "redis"
TLS = "rediss"
SOCKETS = ("unix", "redis+socket")
FORM = "Write redis://:password@host:6379/0, rediss://… for TLS, or unix:///path/redis.sock?db=0"

CERT_REQS = {
    "required": "required",
    "optional": "optional",
    "none": "none",
    "CERT_REQUIRED": "required",
    "CERT_OPTIONAL": "optional",
    "CERT_NONE": "none",
}
"""Values of `ssl_cert_reqs` in redis-py's and in Celery's words."""

TRUE = ("true", "1", "yes")
FALSE = ("false", "0", "no")
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
TLS_TEXTS = ("ssl_ca_data", "ssl_ciphers", "ssl_password")
TLS_OPTIONS = ("ssl_cert_reqs", "ssl_check_hostname", *TLS_FILES, "ssl_ca_path", *TLS_TEXTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """Tells where a Redis is, who we are there, and how its certificate is checked."""

    host: str = "localhost"
    port: int = DEFAULT_PORT
    path: str | None = None
    """Of a unix socket; host and port count no more then."""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Mapping[str, Any] | None = field(default=None, repr=False)
    """Options of TLS in redis-py's words, which Celery takes too; None without TLS."""

    @classmethod
    def parse(cls, url: str, *, setting: str = "redis_url") -> RedisAddress:
        """Raises Invalid, naming `setting` and the part, without repeating the URL."""
        scheme, separator, _ = url.partition("://")
        if not separator:
            raise Invalid(setting, "it is no URL", FORM)
        if scheme not in (TCP, TLS, *SOCKETS):
            problem = f"its scheme is {scheme[:32]!r}, which not every part of Shardline can reach"
            raise Invalid(setting, problem, FORM)
        if ";" in url or "," in url.partition("?")[0].rpartition("@")[2]:
            raise Invalid(
                setting,
                "it names several servers",
                "Name one, such as a proxy that follows the primary",
            )
        parts, port = _split(url, setting)
        options = _options(parts, setting)
        login: dict[str, Any] = {
            "username": unquote(parts.username) if parts.username else None,
            "password": unquote(parts.password) if parts.password else None,
        }
        if scheme in SOCKETS:
            return cls(**login, **_of_socket(parts, options, setting))
        db = options.pop("db", None) or unquote(parts.path).removeprefix("/")
        tls = _tls(options, setting) if scheme == TLS else None
        _refuse_rest(options, scheme, setting)
        host = unquote(parts.hostname or "localhost")
        return cls(**login, host=host, port=port or DEFAULT_PORT, db=_db(db, setting), tls=tls)

    def client_options(self) -> dict[str, Any]:
        """Keywords of `redis.Redis` and of `redis.asyncio.Redis`."""
        login = {"db": self.db, "username": self.username, "password": self.password}
        if self.path is not None:
            return {"unix_socket_path": self.path, **login}
        return {
            "host": self.host,
            "port": self.port,
            **login,
            **({} if self.tls is None else {"ssl": True, **self.tls}),
        }

    def broker_url(self) -> str:
        """Returns Celery's `broker_url`, with the options of TLS: in places kombu gets only the
        URL."""
        options = "" if self.tls is None else f"?{urlencode(self.tls)}"
        return f"{self.celery_url()}{options}"

    def celery_url(self) -> str:
        """Returns Celery's `result_backend`; TLS options are not in it: see `tls`."""
        login = ""
        if self.username or self.password:
            password = f":{quote(self.password, safe='')}" if self.password else ""
            login = f"{quote(self.username or '', safe='')}{password}@"
        if self.path is not None:
            return f"redis+socket://{login}{quote(self.path)}?virtual_host={self.db}"
        host = f"[{self.host}]" if ":" in self.host else quote(self.host, safe="")
        return f"{TCP if self.tls is None else TLS}://{login}{host}:{self.port}/{self.db}"


def _split(url: str, setting: str) -> tuple[SplitResult, int | None]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # Its message may have the password, as what stands before an unencoded slash.
        problem = "its host or port cannot be read"
        raise Invalid(
            setting, problem, "Percent-encode what stands in names and passwords"
        ) from None
    return parts, port


def _options(parts: SplitResult, setting: str) -> dict[str, str]:
    if parts.fragment or "#" in parts.geturl():
        raise Invalid(setting, "it has a '#'", "Write %23")
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) != len(pairs):
        raise Invalid(setting, "it has an option twice", "Write each once")
    return options


def _of_socket(parts: SplitResult, options: dict[str, str], setting: str) -> dict[str, Any]:
    if parts.hostname or not parts.path:
        raise Invalid(setting, "it names no unix socket by its full path", FORM)
    db = options.pop("db", None) or options.pop("virtual_host", "")
    _refuse_rest(options, parts.scheme, setting)
    return {"path": unquote(parts.path), "db": _db(db, setting)}


def _db(text: str, setting: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()):
        raise Invalid(
            setting,
            f"its database is {text[:32]!r}, which is no number",
            "Write a number, such as /0",
        )
    return int(text)


def _tls(options: dict[str, str], setting: str) -> dict[str, Any]:
    """Taken out of `options`. Certificate and name are checked unless the URL asks otherwise."""
    given = {name: options.pop(name) for name in TLS_OPTIONS if name in options}
    reqs = given.pop("ssl_cert_reqs", "required")
    if reqs not in CERT_REQS:
        raise Invalid(
            setting, f"ssl_cert_reqs is {reqs[:32]!r}", "Write required, optional or none"
        )
    named = given.pop("ssl_check_hostname", "true").lower()
    if named not in (*TRUE, *FALSE):
        raise Invalid(setting, f"ssl_check_hostname is {named[:32]!r}", "Write true or false")
    found: dict[str, Any] = {
        "ssl_cert_reqs": CERT_REQS[reqs],
        "ssl_check_hostname": named in TRUE and CERT_REQS[reqs] != "none",
    }
    missing = [name for name in TLS_FILES if name in given and not Path(given[name]).is_file()]
    if missing or ("ssl_ca_path" in given and not Path(given["ssl_ca_path"]).is_dir()):
        name = missing[0] if missing else "ssl_ca_path"
        raise Invalid(
            setting, f"{name} names nothing that is there", "Put it there, or leave the option out"
        )
    return {**found, **given}


def _refuse_rest(options: Mapping[str, str], scheme: str, setting: str) -> None:
    for name in sorted(options):
        if name in TLS_OPTIONS:
            raise Invalid(
                setting, f"{name} is for TLS, and its scheme is {scheme}", "Write rediss://…"
            )
        remedy = f"Leave it out; there are db and, with rediss://, {', '.join(TLS_OPTIONS)}"
        raise Invalid(
            setting,
            f"it has the option {name[:64]!r}, which not every part of Shardline can keep",
            remedy,
        )
