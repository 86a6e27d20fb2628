"""The address of Postgres: one URL, parsed once, with libpq's own parser, for every driver and
tool. Opens nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import URL
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from shardline.base.errors import Invalid

SCHEMES = ("postgresql", "postgres", "postgresql+psycopg", "postgresql+psycopg_async")
FIELD = "database_url"
FORM = "Write postgresql://user:password@host/database"

CHOICES = {
    "sslmode": ("disable", "allow", "prefer", "require", "verify-ca", "verify-full"),
    # Shardline writes: a standby is of no use to it.
    "target_session_attrs": ("any", "read-write", "primary"),
}
FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile")
SYSTEM_ROOTS = "system"
"""Of `sslrootcert`: no file, but the certificates that the machine trusts."""

UNKNOWN = re.compile(r'invalid URI query parameter: "([a-z_]+)"', re.IGNORECASE)
"""The one of libpq's complaints that repeats nothing secret; others quote the URL."""

MAX_PORT = 65_535


def normalize(url: str) -> URL:
    """Any Postgres URL that libpq takes, of a unix socket and of several hosts too, with the
    psycopg 3 driver.

    Raises Invalid, naming the parameter, without repeating the URL.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise Invalid(FIELD, "it is no URL", FORM)
    if scheme not in SCHEMES:
        raise Invalid(FIELD, f"its scheme is {scheme!r}", "Write postgresql://…")
    try:
        given = conninfo_to_dict(f"postgresql://{_with_one_host(rest)}")
    except ProgrammingError as error:
        if unknown := UNKNOWN.search(str(error)):
            problem = f"libpq has no parameter {unknown[1]!r}"
            raise Invalid(FIELD, problem, "See libpq's list of parameter key words") from None
        raise Invalid(FIELD, "it is no URL", FORM) from None
    except ValueError:
        raise Invalid(FIELD, "it is no URL", FORM) from None
    parameters = {name: str(value) for name, value in given.items()}
    _check(parameters)
    return _url_of(parameters)


def libpq_parameters(url: str | URL) -> dict[str, Any]:
    """The URL as keywords of `psycopg.connect`: the same that an engine of SQLAlchemy gives to its
    connections."""
    parsed = normalize(url) if isinstance(url, str) else url
    dialect: Any = PGDialect_psycopg()  # type: ignore[no-untyped-call] # it has no types
    _, parameters = dialect.create_connect_args(parsed)
    return dict(parameters)


def _with_one_host(rest: str) -> str:
    """SQLAlchemy's form of several hosts, `?host=a:1&host=b:2`, as libpq's,
    `?host=a,b&port=1,2`."""
    authority, _, query = rest.partition("?")
    pairs = [pair for pair in query.split("&") if pair]
    hosts = [pair.removeprefix("host=") for pair in pairs if pair.startswith("host=")]
    if len(hosts) < 2:
        return rest
    split = [host.partition(":") for host in hosts]
    names = ",".join(name for name, _, _ in split)
    ports = ",".join(port for _, _, port in split)
    others = [pair for pair in pairs if not pair.startswith("host=")]
    return f"{authority}?{'&'.join([*others, f'host={names}', f'port={ports}'])}"


def _check(parameters: dict[str, str]) -> None:
    for port in parameters.get("port", "").split(","):
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
            raise Invalid(FIELD, "its port is no number from 1 to 65535", FORM)
    for name, choices in CHOICES.items():
        if parameters.get(name, choices[0]) not in choices:
            problem = f"{name} is {parameters[name][:32]!r}"
            raise Invalid(FIELD, problem, f"Write one of: {', '.join(choices)}")
    for name in FILES:
        path = parameters.get(name)
        if path and path != SYSTEM_ROOTS and not Path(path).exists():
            raise Invalid(
                FIELD,
                f"{name} names a file that is not there",
                "Put it there, or leave the parameter out",
            )


def _url_of(parameters: dict[str, str]) -> URL:
    host = parameters.pop("host", "")
    port = parameters.pop("port", "")
    is_plain = bool(host) and "," not in host and not host.startswith(("/", "@"))
    if is_plain:
        address: dict[str, Any] = {"host": host, "port": int(port) if port else None}
        query = {}
    else:
        address = {}
        query = {
            name: value
            for name, value in (("host", host), ("port", port.strip(",") and port))
            if value
        }
    if "," in host:
        # Of several hosts the one that takes writes: which it is changes with a failover.
        parameters.setdefault("target_session_attrs", "read-write")
    return URL.create(
        "postgresql+psycopg",
        username=parameters.pop("user", None),
        password=parameters.pop("password", None),
        database=parameters.pop("dbname", None),
        query={**query, **parameters},
        **address,
    )
