"""Every form of a Postgres URL: the same reaches libpq from pools and listeners, or it is
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import event

from shardline.base.errors import Invalid
from shardline.store.connection.database import connect, connect_arguments
from shardline.store.connection.database_url import libpq_parameters, normalize

OURS = set(connect_arguments({"host": "/run"})) - {"host"}


def sent(url: str) -> dict[str, Any]:
    """What a pool gives to psycopg, without what we add to every URL."""
    engine = connect(url)
    seen: dict[str, Any] = {}

    def look(
        _dialect: object, _record: object, _arguments: object, parameters: dict[str, Any]
    ) -> None:
        seen.update(parameters)
        raise InterruptedError

    event.listen(engine, "do_connect", look)
    with pytest.raises(InterruptedError):
        engine.connect()
    return {name: value for name, value in seen.items() if name not in OURS and name != "context"}


@pytest.mark.parametrize(
    ("url", "parameters"),
    [
        ("postgresql://u:p@h:5433/name", {"host": "h", "port": 5433}),
        ("postgres://u:p@h/name", {"host": "h"}),
        ("postgresql+psycopg://u:p@[::1]:5433/name", {"host": "::1", "port": 5433}),
        ("postgresql+psycopg_async://u:p@/name?host=/run/sockets", {"host": "/run/sockets"}),
        ("postgresql://u:p@%2Frun%2Fsockets/name", {"host": "/run/sockets"}),
        (
            "postgresql://u:p@/name?host=/run/sockets&port=5433",
            {"host": "/run/sockets", "port": "5433"},
        ),
        (
            "postgresql://u:p@h1:5432,h2:5433/name?target_session_attrs=any",
            {"host": "h1,h2", "port": "5432,5433", "target_session_attrs": "any"},
        ),
        (
            "postgresql://u:p@[::1],[::2]/name",
            {"host": "::1,::2", "target_session_attrs": "read-write"},
        ),
        (
            "postgresql://u:p@/name?host=h1:5432&host=h2:5433",
            {"host": "h1,h2", "port": "5432,5433", "target_session_attrs": "read-write"},
        ),
        ("postgresql://u:p@h/name?sslmode=verify-full", {"host": "h", "sslmode": "verify-full"}),
        ("postgresql://u:p@h/name?sslrootcert=system", {"host": "h", "sslrootcert": "system"}),
    ],
)
def test_a_pool_and_a_listener_send_what_the_url_says(url: str, parameters: dict[str, Any]) -> None:
    assert sent(url) == libpq_parameters(url)
    assert libpq_parameters(url) == {
        "user": "u",
        "password": "p",
        "dbname": "name",
    } | parameters | ({"port": ","} if "[::1]," in url else {})


def test_percent_encoded_names_and_passwords_are_decoded_once() -> None:
    found = sent("postgresql://us%40er:p%2540%2F%3A%2B+@h/na%20me")
    assert (found["user"], found["password"], found["dbname"]) == ("us@er", "p%40/:++", "na me")


def test_psycopg_3_is_the_driver_of_every_postgres_url() -> None:
    for scheme in ("postgresql", "postgres", "postgresql+psycopg", "postgresql+psycopg_async"):
        assert normalize(f"{scheme}://u@h/name").drivername == "postgresql+psycopg"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("mysql://user:secret@host/name", "scheme is 'mysql'"),
        ("nonsense secret", "no URL"),
        ("postgresql://user:secret@[::1/name", "no URL"),
        ("postgresql://user:secret%00@host/name", "no URL"),
        ("postgresql://user:secret@host:port/name", "port is no number"),
        ("postgresql://user:secret@h1:1,h2:70000/name", "port is no number"),
        (
            "postgresql://user:secret@host/name?prepare_threshold=0",
            "no parameter 'prepare_threshold'",
        ),
        ("postgresql://user:secret@host/name?sslmode=verify", "sslmode is 'verify'"),
        (
            "postgresql://user:secret@host/name?target_session_attrs=standby",
            "target_session_attrs is 'standby'",
        ),
        (
            "postgresql://user:secret@host/name?sslrootcert=/not/there.pem",
            "sslrootcert names a file",
        ),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name_and_without_the_password(
    url: str, problem: str
) -> None:
    with pytest.raises(Invalid, match=f"^database_url: .*{problem}") as caught:
        connect(url)
    assert "secret" not in str(caught.value)


def test_options_of_the_url_are_kept_between_our_defaults_and_what_we_need() -> None:
    options = sent_options(
        "postgresql://h/d?options=-csearch_path%3Dapp%20-c%20statement_timeout%3D3s"
    )
    assert options.index("statement_timeout=30000") < options.index("statement_timeout=3s")
    assert options.index("-csearch_path=app") < options.index("-c DateStyle=ISO")


def sent_options(url: str, **arguments: float) -> str:
    """The `options` of a connection."""
    parameters = libpq_parameters(url)
    made = connect_arguments(parameters, **arguments)  # type: ignore[arg-type] # floats
    return str(made["options"])


def test_options_of_the_environment_are_kept_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c geqo=off")
    assert "-c geqo=off" in sent_options("postgresql://h/d")
    assert "-c geqo=off" not in sent_options("postgresql://h/d?options=-cx.y%3D1"), (
        "libpq's own order"
    )


async def test_pghostaddr_does_not_lead_away_from_a_socket(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGHOSTADDR", "192.0.2.1")
    arguments = connect_arguments(libpq_parameters(database_url))
    with psycopg.connect(**arguments) as connection:
        assert connection.info.host.startswith("/")
    async with await psycopg.AsyncConnection.connect(**arguments) as asynchronous:
        assert asynchronous.info.host.startswith("/")
    arguments = connect_arguments(libpq_parameters("postgresql://db.internal/d"))
    assert "hostaddr" not in arguments, "a name may have its address there"


def test_a_time_limit_that_a_caller_needs_comes_last() -> None:
    options = sent_options(
        "postgresql://h/d?options=-cstatement_timeout%3D3s", statement_timeout_s=0
    )
    assert options.rindex("statement_timeout=0") > options.index("statement_timeout=3s")


def test_what_the_url_says_of_the_connection_is_kept() -> None:
    given = libpq_parameters(
        "postgresql://h/d?connect_timeout=2&application_name=mine&client_encoding=latin1"
    )
    arguments = connect_arguments(given, application_name="ours")
    assert (arguments["connect_timeout"], arguments["application_name"]) == ("2", "mine")
    assert arguments["client_encoding"] == "UTF8", "what our decoders need"


def test_timeouts_reach_the_server_in_milliseconds() -> None:
    options = connect_arguments({}, statement_timeout_s=1.5, lock_timeout_s=0, idle_timeout_s=2)[
        "options"
    ]
    assert str(options).endswith(
        "-c statement_timeout=1500 -c lock_timeout=0 -c idle_in_transaction_session_timeout=2000"
    )


def test_a_file_that_is_there_is_taken(tmp_path: Path) -> None:
    (tmp_path / "root.pem").touch()
    url = f"postgresql://h/d?sslmode=verify-ca&sslrootcert={tmp_path}/root.pem"
    assert libpq_parameters(url)["sslrootcert"] == f"{tmp_path}/root.pem"
