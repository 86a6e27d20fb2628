"""One Redis URL, real servers: redis-py, Celery, its result backend and Flower reach the same one,
or none does."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from celery.result import AsyncResult
from flower.utils.broker import Broker
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from services.standalone.servers import Valkey
from shardline.base.config import Settings
from shardline.base.redis import async_redis_client, redis_client
from shardline.contract.queues import celery_settings
from tests.tls_front import AUTHORITY, TLS, tls_front

TIMEOUT_S = 5.0
QUEUE = "heard"
AWAY = (RedisError, OperationalError, OSError)

ACL = "user caller on >p%40ss/w:rd#? ~* &* +@all"
USER = "caller:p%2540ss%2Fw%3Ard%23%3F"
"""Its password, `p%40ss/w:rd#?`, as a URL has it."""


def app_of(url: str, *, results: bool = False) -> Celery:
    """As every service of ours makes it."""
    app = Celery("ours", set_as_current=False)
    app.conf.update(
        celery_settings(Settings(redis_url=url, result_backend=url if results else None))
    )
    impatient = {
        "socket_timeout": TIMEOUT_S,
        "max_retries": 1,
        "interval_start": 0,
        "interval_step": 0,
    }
    app.conf.broker_transport_options = {**app.conf.broker_transport_options, **impatient}
    return app


def by_redis(url: str) -> None:
    with redis_client(url, timeout_s=TIMEOUT_S) as client:
        client.rpush(QUEUE, b"redis-py")


def by_asyncio(url: str) -> None:
    async def push() -> None:
        client = async_redis_client(url, timeout_s=TIMEOUT_S)
        try:
            await client.rpush(QUEUE, b"asyncio")
        finally:
            await client.aclose()

    asyncio.run(push())


def by_celery(url: str) -> None:
    # A connection of its own: kombu's pools are of the process and know theirs by the URL alone.
    with app_of(url) as app, app.connection() as connection:
        app.send_task("any", queue=QUEUE, retry=False, connection=connection)


def by_remote_control(url: str) -> None:
    with app_of(url) as app, app.connection() as connection:
        app.control.broadcast("ping", connection=connection)


def by_results(url: str) -> None:
    with app_of(url, results=True) as app:
        app.backend.client.connection_pool.connection_kwargs["retry"] = None
        app.backend.client.rpush(QUEUE, b"result backend")


def by_flower(url: str) -> None:
    """As its page of brokers does."""
    with app_of(url) as app:
        with app.connection() as connection:
            broker_url = connection.as_uri(include_password=True)
        options = {
            "broker_options": app.conf.broker_transport_options,
            "broker_use_ssl": app.conf.broker_use_ssl,
        }
        asyncio.run(Broker(broker_url, **options).queues([QUEUE]))


WAYS = (by_redis, by_asyncio, by_celery, by_remote_control, by_results, by_flower)
Way = Callable[[str], None]


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    """With a user of its own, and a unix socket beside its port."""
    home = Path(tempfile.mkdtemp(prefix="shardline-url-"))
    server = Valkey(home, settings={"unixsocket": f'"{home}/so cket"', "unixsocketperm": "700"})
    server.start()
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", *ACL.split()[1:])
    yield server
    server.kill()
    shutil.rmtree(home, ignore_errors=True)


def heard(server: Valkey, db: int) -> bool:
    """Whether any queue or binding came to this database, and none to another."""
    with redis.Redis.from_url(server.url) as client:
        keyspace: Any = client.info("keyspace")
        client.flushall()
    return set(keyspace) == {f"db{db}"}


@pytest.mark.parametrize("way", [way for way in WAYS if way not in (by_flower, by_remote_control)])
@pytest.mark.parametrize(
    ("form", "db"),
    [
        ("redis://{user}@127.0.0.1:{port}", 0),
        ("redis://{user}@127.0.0.1:{port}/3", 3),
        ("redis://{user}@127.0.0.1:{port}?db=4", 4),
        ("redis://{user}@localhost:{port}/5", 5),
        ("unix://{user}@{home}/so%20cket", 0),
        ("unix://{user}@{home}/so%20cket?db=6", 6),
        ("redis+socket://{user}@{home}/so%20cket?virtual_host=7", 7),
    ],
)
def test_every_library_reaches_the_same_database_as_the_same_user(
    server: Valkey, form: str, db: int, way: Way
) -> None:
    heard(server, db)
    way(form.format(user=USER, port=server.port, home=server.home))
    assert heard(server, db)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("certificate", ["impostor", "elsewhere"])
def test_no_password_reaches_a_server_whose_certificate_is_not_good(
    server: Valkey, certificate: str, way: Way
) -> None:
    with tls_front(("127.0.0.1", server.port), certificate) as front:
        url = f"rediss://:secret@127.0.0.1:{front.port}/0?ssl_ca_certs={AUTHORITY}"
        with pytest.raises(AWAY):
            way(url)
        with pytest.raises(AWAY):
            way(url.partition("?")[0])
    assert not front.heard


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("certificate", "options"),
    [
        ("server", "ssl_ca_certs={tls}/authority.pem"),
        ("server", "ssl_cert_reqs=CERT_REQUIRED&ssl_ca_certs={tls}/authority.pem"),
        ("elsewhere", "ssl_check_hostname=false&ssl_ca_certs={tls}/authority.pem"),
        ("impostor", "ssl_cert_reqs=none"),
    ],
)
def test_options_of_tls_mean_the_same_to_every_library(
    server: Valkey, certificate: str, options: str, way: Way
) -> None:
    password = urlsplit(server.url).password
    with tls_front(("127.0.0.1", server.port), certificate) as front:
        way(f"rediss://:{password}@127.0.0.1:{front.port}/0?{options.format(tls=TLS)}")
    assert front.heard


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_asks_for_the_callers_certificate_gets_it(server: Valkey, way: Way) -> None:
    password = urlsplit(server.url).password
    with tls_front(("127.0.0.1", server.port), "server", asks_callers=True) as front:
        url = f"rediss://:{password}@127.0.0.1:{front.port}/0?ssl_ca_certs={AUTHORITY}"
        way(f"{url}&ssl_certfile={TLS}/caller.pem&ssl_keyfile={TLS}/caller.pem")
        assert front.heard
        front.heard.clear()
        with pytest.raises(AWAY):
            way(url)
        assert not front.heard


def test_a_result_comes_back_through_tls(server: Valkey) -> None:
    password = urlsplit(server.url).password
    with tls_front(("127.0.0.1", server.port), "server") as front:
        url = f"rediss://:{password}@127.0.0.1:{front.port}/2?ssl_ca_certs={AUTHORITY}"
        with app_of(url, results=True) as app:
            app.backend.store_result("an-id", {"text": "done"}, "SUCCESS")
            assert AsyncResult("an-id", app=app).get(timeout=TIMEOUT_S) == {"text": "done"}
