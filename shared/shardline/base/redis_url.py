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
SENTINEL = "sentinel"
SENTINEL_PORT = 26379
SENTINEL_WAITS = {"socket_timeout": 5, "socket_connect_timeout": 5}
"""Seconds, of kombu and Celery for each Sentinel: by itself redis-py has no bound."""
SCHEMES = (TCP, TLS, *SOCKETS, SENTINEL)
FORM = "Write redis://:password@host:6379/0, rediss://… for TLS, or unix:///path/redis.sock?db=0"
SENTINELS_FORM = "Write sentinel://:password@host:26379,host:26379/0?master_name=mymaster"

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
class SentinelGroup:
    """The Sentinels that tell which server is the primary."""

    hosts: tuple[tuple[str, int], ...]
    master_name: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    def login(self) -> dict[str, Any]:
        """Returns keywords of redis-py for the Sentinels themselves."""
        return {"username": self.username, "password": self.password}


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
    sentinel: SentinelGroup | None = None
    """Who knows the server; host, port and path count no more then."""

    @classmethod
    def parse(cls, url: str, *, setting: str = "redis_url") -> RedisAddress:
        """Raises Invalid, naming `setting` and the part, without repeating the URL."""
        scheme, separator, _ = url.partition("://")
        if not separator:
            raise Invalid(setting, "it is no URL", FORM)
        if scheme == SENTINEL:
            return cls(**_of_sentinels(url, setting))
        if scheme not in SCHEMES:
            problem = f"its scheme is {scheme[:32]!r}, which not every part of Shardline can reach"
            raise Invalid(setting, problem, FORM)
        if ";" in url or "," in url.partition("?")[0].rpartition("@")[2]:
            raise Invalid(
                setting,
                "it names several servers",
                "Name one, or the Sentinels that follow the primary: sentinel://…",
            )
        parts, port = _split(url, setting)
        options = _options(parts, setting)
        login = _login(parts)
        if scheme in SOCKETS:
            return cls(**login, **_of_socket(parts, options, setting))
        db = _named_db(parts, options)
        tls = _tls(options, setting) if scheme == TLS else None
        _refuse_rest(options, scheme, setting)
        host = unquote(parts.hostname or "localhost")
        return cls(**login, host=host, port=port or DEFAULT_PORT, db=_db(db, setting), tls=tls)

    def client_options(self) -> dict[str, Any]:
        """Keywords of `redis.Redis` and of `redis.asyncio.Redis`. Without a host where Sentinels
        know it."""
        login = {"db": self.db, "username": self.username, "password": self.password}
        if self.path is not None:
            return {"unix_socket_path": self.path, **login}
        host = {} if self.sentinel is not None else {"host": self.host, "port": self.port}
        return {**host, **login, **self.tls_options()}

    def tls_options(self) -> dict[str, Any]:
        """Returns keywords of redis-py, none without TLS."""
        return {} if self.tls is None else {"ssl": True, **self.tls}

    def transport_options(self) -> dict[str, Any]:
        """Returns what kombu and Celery's result backend must know of Sentinels beside the URL."""
        if self.sentinel is None:
            return {}
        login = {name: value for name, value in self.sentinel.login().items() if value is not None}
        return {
            "master_name": self.sentinel.master_name,
            "sentinel_kwargs": {**login, **self.tls_options(), **SENTINEL_WAITS},
        }

    def broker_url(self) -> str:
        """Returns Celery's `broker_url`, with the options of TLS: in places kombu gets only the
        URL."""
        options = "" if self.tls is None or self.sentinel else f"?{urlencode(self.tls)}"
        return f"{self.celery_url()}{options}"

    def celery_url(self) -> str:
        """Returns Celery's `result_backend`; TLS options are not in it: see `tls`."""
        login = ""
        if self.username or self.password:
            password = f":{quote(self.password, safe='')}" if self.password else ""
            login = f"{quote(self.username or '', safe='')}{password}@"
        if self.path is not None:
            return f"redis+socket://{login}{quote(self.path)}?virtual_host={self.db}"
        if self.sentinel is not None:
            servers = (f"{login}{_netloc(*each)}/{self.db}" for each in self.sentinel.hosts)
            return ";".join(f"{SENTINEL}://{server}" for server in servers)
        scheme = TCP if self.tls is None else TLS
        return f"{scheme}://{login}{_netloc(self.host, self.port)}/{self.db}"


def _netloc(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{quote(host, safe='')}:{port}"


def _login(parts: SplitResult) -> dict[str, Any]:
    return {
        "username": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
    }


def _named_db(parts: SplitResult, options: dict[str, str]) -> str:
    """Taken out of `options`, if it is not in the path."""
    return options.pop("db", None) or unquote(parts.path).removeprefix("/")


def _of_sentinels(url: str, setting: str) -> dict[str, Any]:
    """Reads servers that stand side by side, or each as a URL as Celery writes them; login,
    database and options may stand with any of them."""
    chunks = _sentinel_urls(url, setting)
    options: dict[str, str] = {}
    for chunk in chunks:
        options |= _options(chunk, setting)
    dbs = {_named_db(chunk, options) for chunk in chunks} - {""}
    logins = [_login(chunk) for chunk in chunks if "@" in chunk.netloc]
    if len(dbs) > 1 or any(login != logins[0] for login in logins):
        problem = "its Sentinels name several databases or logins"
        raise Invalid(setting, problem, "Name those of the server that they know")
    if "master_name" not in options:
        raise Invalid(setting, "it does not say which server its Sentinels know", SENTINELS_FORM)
    names = ",".join(chunk.netloc.rpartition("@")[2] for chunk in chunks)
    group = SentinelGroup(
        hosts=tuple(_sentinel(name, setting) for name in names.split(",")),
        master_name=options.pop("master_name"),
        username=options.pop("sentinel_username", None),
        password=options.pop("sentinel_password", None),
    )
    has_tls = any(name in TLS_OPTIONS for name in options)
    tls = _tls(options, setting) if has_tls else None
    _refuse_rest(options, SENTINEL, setting)
    found: dict[str, Any] = {"sentinel": group, "tls": tls, "db": _db("".join(dbs), setting)}
    return {**found, **(logins[0] if logins else {})}


def _sentinel_urls(url: str, setting: str) -> list[SplitResult]:
    texts = [text.strip() for text in url.split(";") if text.strip()]
    try:
        chunks = [urlsplit(text if "://" in text else f"{SENTINEL}://{text}") for text in texts]
    except ValueError:
        raise _unreadable(setting) from None
    if any(chunk.scheme != SENTINEL for chunk in chunks):
        raise Invalid(setting, "it mixes Sentinels with other servers", SENTINELS_FORM)
    return chunks


def _sentinel(name: str, setting: str) -> tuple[str, int]:
    parts, port = _split(f"{SENTINEL}://{name}", setting)
    if not parts.hostname:
        raise Invalid(setting, "one of its Sentinels has no host", SENTINELS_FORM)
    return unquote(parts.hostname), port or SENTINEL_PORT


def _split(url: str, setting: str) -> tuple[SplitResult, int | None]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _unreadable(setting) from None
    return parts, port


def _unreadable(setting: str) -> Invalid:
    """Python's own message may have the password, as what stands before an unencoded slash."""
    problem = "its host or port cannot be read"
    return Invalid(setting, problem, "Percent-encode what stands in names and passwords")


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
