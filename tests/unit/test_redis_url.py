"""Every form of a Redis URL: taken by redis-py and Celery alike, or refused by name. No server
needed."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from celery import Celery
from kombu.connection import Connection
from redis.connection import parse_url

from shardline.base.config import Settings
from shardline.base.errors import Invalid
from shardline.base.redis_url import SENTINEL_WAITS, RedisAddress
from shardline.contract.queues import celery_settings
from tests.tls_front import AUTHORITY, TLS

BOTH_TAKE = (
    "redis://",
    "redis://host",
    "redis://host:7000/3",
    "redis://[::1]:7000/3",
    "redis://:p%40ss%2Fw@host/1",
    "redis://user:p%2540%3A%20+@host/1",
    "redis://us%40er@host/1",
    "redis://:p%3Bw@host",
)


@pytest.mark.parametrize("url", BOTH_TAKE)
def test_what_we_read_of_a_plain_url_is_what_both_libraries_read(url: str) -> None:
    address = RedisAddress.parse(url)
    ours = {"host": address.host, "port": address.port, "db": address.db}
    theirs = {
        "host": "localhost",
        "port": 6379,
        "db": 0,
        "username": None,
        "password": None,
    } | parse_url(url)
    assert theirs == ours | {"username": address.username, "password": address.password}
    kombu = Connection(address.celery_url())
    assert (kombu.hostname, kombu.port, int(kombu.virtual_host or 0)) == (
        address.host,
        address.port,
        address.db,
    )
    assert (kombu.userid, kombu.password) == (address.username, address.password)


def test_certificate_and_name_are_checked_unless_the_url_says_otherwise() -> None:
    assert RedisAddress.parse("rediss://host").tls == {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
    }
    assert RedisAddress.parse("rediss://host?ssl_cert_reqs=CERT_NONE").tls == {
        "ssl_cert_reqs": "none",
        "ssl_check_hostname": False,
    }


def test_celery_gets_the_options_of_tls_for_broker_and_results_apart() -> None:
    url = f"rediss://:secret@host/1?ssl_ca_certs={AUTHORITY}&ssl_password=p%25"
    found = celery_settings(
        Settings(redis_url=url, result_backend="rediss://results/2?ssl_check_hostname=no")
    )
    assert found["broker_url"].startswith("rediss://:secret@host:6379/1?ssl_cert_reqs=required&")
    assert found["broker_use_ssl"] == {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_ca_certs": str(AUTHORITY),
        "ssl_password": "p%",
    }
    assert Connection(found["broker_url"]).ssl == found["broker_use_ssl"] | {
        "ssl_cert_reqs": ssl.CERT_REQUIRED
    }
    assert found["result_backend"] == "rediss://results:6379/2"
    assert found["redis_backend_use_ssl"] == {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": False,
    }


SENTINELS = (
    "sentinel://user:p%40ss@one,two:7000,[::1]:7001/3?master_name=main&sentinel_password=secret",
    "sentinel://user:p%40ss@one/3;sentinel://user:p%40ss@two:7000/3;"
    "sentinel://user:p%40ss@[::1]:7001/3?master_name=main&sentinel_password=secret",
    "sentinel://user:p%40ss@one;two:7000; [::1]:7001/3?master_name=main&sentinel_password=secret",
)


@pytest.mark.parametrize("url", SENTINELS)
def test_sentinels_stand_side_by_side_or_each_as_a_url(url: str) -> None:
    address = RedisAddress.parse(url)

    assert address.sentinel is not None
    assert address.sentinel.hosts == (("one", 26379), ("two", 7000), ("::1", 7001))
    assert (address.username, address.password, address.db) == ("user", "p@ss", 3)
    assert (address.sentinel.master_name, address.sentinel.password) == ("main", "secret")
    found = celery_settings(Settings(redis_url=url, result_backend=url))
    login = "sentinel://user:p%40ss@"
    celerys = f"{login}one:26379/3;{login}two:7000/3;{login}[::1]:7001/3"
    assert (found["broker_url"], found["result_backend"]) == (celerys, celerys)
    options = {"master_name": "main", "sentinel_kwargs": {"password": "secret", **SENTINEL_WAITS}}
    assert found["result_backend_transport_options"] == options
    assert found["broker_transport_options"].items() >= options.items()


def test_tls_of_sentinels_is_theirs_and_the_servers() -> None:
    found = celery_settings(
        Settings(redis_url=f"sentinel://one?master_name=main&ssl_ca_certs={AUTHORITY}")
    )

    tls = found["broker_use_ssl"]
    assert (tls["ssl_cert_reqs"], tls["ssl_ca_certs"]) == ("required", str(AUTHORITY))
    assert found["broker_transport_options"]["sentinel_kwargs"] == {
        "ssl": True,
        **tls,
        **SENTINEL_WAITS,
    }


def test_a_worker_that_shows_its_settings_warns_of_no_insecure_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = Celery("shown", set_as_current=False)
    for url in (
        "rediss://:secret@host/1",
        "sentinel://:secret@h?master_name=m&sentinel_password=secret",
    ):
        app.conf.update(celery_settings(Settings(redis_url=url)))
        shown = app.conf.humanize(with_defaults=False, censored=True)
        assert "insecure" not in caplog.text
        assert "secret" not in shown


def test_another_kind_of_result_backend_is_celerys_own_matter() -> None:
    url = "db+postgresql://u:p@h1,h2/d?sslmode=verify-full"
    assert celery_settings(Settings(result_backend=url))["result_backend"] == url


REFUSED = (
    ("nonsense secret", "no URL"),
    ("amqp://u:secret@host", "scheme is 'amqp'"),
    ("sentinel://u:secret@host:26379", "which server its Sentinels know"),
    ("sentinel://u:secret@one,two:none?master_name=m", "host or port"),
    ("sentinel://u:secret@one,:1?master_name=m", "has no host"),
    ("sentinel://:secret@one/1;sentinel://two/2?master_name=m", "several databases"),
    ("sentinel://:secret@one;sentinel://:other@two?master_name=m", "several databases or logins"),
    ("sentinel://:secret@one;redis://two?master_name=m", "mixes Sentinels"),
    ("sentinel://:secret@one?master_name=m&socket_timeout=5", "option 'socket_timeout'"),
    ("redis+cluster://u:secret@host", r"scheme is 'redis\+cluster'"),
    ("redis://u:secret@one:1;redis://u:secret@two:2", "several servers"),
    ("redis://u:secret@one:1,two:2/0", "several servers"),
    ("redis://u:secret/with@host:1/0", "host or port"),
    ("redis://u:secret@host:none/0", "host or port"),
    ("redis://u:secret@host/#1", "'#'"),
    ("redis://u:secret@host/zero", "database is 'zero'"),
    ("redis://u:secret@host?db=-1", "database is '-1'"),
    ("redis://u:secret@host?db=1&db=2", "an option twice"),
    ("redis://u:secret@host?socket_timeout=5", "option 'socket_timeout'"),
    ("redis://u:secret@host?ssl_cert_reqs=required", "ssl_cert_reqs is for TLS"),
    ("rediss://u:secret@host?ssl_cert_reqs=maybe", "ssl_cert_reqs is 'maybe'"),
    ("rediss://u:secret@host?ssl_check_hostname=maybe", "ssl_check_hostname is 'maybe'"),
    ("rediss://u:secret@host?ssl_min_version=771", "option 'ssl_min_version'"),
    ("rediss://u:secret@host?ssl_ca_certs=/not/there.pem", "ssl_ca_certs names nothing"),
    ("rediss://u:secret@host?ssl_ca_path=/not/there", "ssl_ca_path names nothing"),
    ("rediss://u:secret@host?ssl_validate_ocsp=true", "option 'ssl_validate_ocsp'"),
    ("unix://u:secret@relative/path.sock", "no unix socket"),
    ("unix:///run/redis.sock?ssl_cert_reqs=none", "ssl_cert_reqs is for TLS"),
)


@pytest.mark.parametrize(("url", "problem"), REFUSED)
def test_what_not_every_library_can_keep_is_refused_without_the_password(
    url: str, problem: str
) -> None:
    with pytest.raises(Invalid, match=f"^redis_url: .*{problem}") as caught:
        Settings(redis_url=url)
    assert "secret" not in str(caught.value)


def test_the_password_is_in_no_text_of_an_address() -> None:
    address = RedisAddress.parse(
        f"rediss://u:secret@h?ssl_password=secret&ssl_certfile={TLS}/caller.pem"
    )
    assert "secret" not in repr(address)


def test_certificates_may_stand_in_a_folder_or_in_the_url_itself(tmp_path: Path) -> None:
    assert RedisAddress.parse(f"rediss://h?ssl_ca_path={tmp_path}").client_options()[
        "ssl_ca_path"
    ] == str(tmp_path)
    long = "-----BEGIN%20CERTIFICATE-----" + "A" * 5_000
    assert (
        len(RedisAddress.parse(f"rediss://h?ssl_ca_data={long}").client_options()["ssl_ca_data"])
        > 5_000
    )
