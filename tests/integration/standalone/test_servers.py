"""The embedded servers: they start, survive crashes, and never outlive the process that started
them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import text

from services.standalone.ports import free_port
from services.standalone.processes import StartFailed
from services.standalone.servers import FAST, Postgres, Valkey, socket_folder
from services.standalone.settings import StandaloneSettings
from services.standalone.state_dir import AlreadyUp, StateDir
from services.standalone.supervisor import Supervisor
from shardline.store.connection.database import transaction


def test_the_databases_encoding_is_utf8(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SHOW server_encoding").fetchone() == ("UTF8",)
        assert connection.execute("SELECT upper('äé')").fetchone() == ("ÄÉ",)


def test_a_restarted_redis_is_empty_on_the_same_port(redis_server: Valkey) -> None:
    url = redis_server.url
    redis.Redis.from_url(url).set("left", "over")
    redis_server.kill()
    with pytest.raises(redis.ConnectionError):
        redis.Redis.from_url(url).ping()
    redis_server.restart()
    assert redis_server.url == url
    assert redis.Redis.from_url(url).dbsize() == 0


def test_a_resumed_redis_answers_again(redis_server: Valkey) -> None:
    redis_server.pause()
    with pytest.raises(redis.TimeoutError):
        redis.Redis.from_url(redis_server.url, socket_timeout=0.1).ping()
    redis_server.resume()
    assert redis.Redis.from_url(redis_server.url).ping()


def test_redis_refuses_without_the_password(redis_server: Valkey) -> None:
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=redis_server.port, retry=Retry(NoBackoff(), 0)).ping()


def test_a_fixed_port_that_is_taken_is_named(tmp_path: Path, redis_server: Valkey) -> None:
    second = Valkey(tmp_path, port=redis_server.port)
    with pytest.raises(StartFailed):
        second.start()
    assert not second.is_running()


def test_committed_rows_survive_a_killed_postgres(tmp_path: Path) -> None:
    server = Postgres(tmp_path, settings=FAST)
    server.start()
    try:
        with psycopg.connect(server.url()) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
        server.restart()
        with psycopg.connect(server.url()) as connection:
            assert connection.execute("SELECT number FROM kept").fetchone() == (7,)
    finally:
        server.stop()


def test_a_stale_pid_file_leaves_the_pids_new_owner_alone(tmp_path: Path) -> None:
    server = Postgres(tmp_path, settings=FAST)
    server.start()
    server.stop()
    stale = server.data / "postmaster.pid"
    stale.write_text(f"{os.getpid()}\n{server.data}\n0\n5432\n{server.sockets}\n\n0 0\nready\n")
    server.start()
    try:
        assert server.is_running()
        assert psutil.pid_exists(os.getpid())
    finally:
        server.stop()


def test_servers_end_with_their_killed_parent(tmp_path: Path) -> None:
    program = (
        "import sys, signal; from pathlib import Path; "
        "from services.standalone.servers import Postgres, Valkey\n"
        "home = Path(sys.argv[1]); servers = [Postgres(home), Valkey(home)]\n"
        "[server.start() for server in servers]\n"
        "print(*[server.pid for server in servers], flush=True); signal.pause()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(children) == 2
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


def test_the_path_of_sockets_fits_in_a_home_with_a_long_path(tmp_path: Path) -> None:
    folder = socket_folder(tmp_path / ("long" * 30))
    assert len(str(folder)) < 100
    assert folder.is_dir()


@pytest.mark.parametrize("name", ["a b", "q'd\"p%20#e[f]?g&h+é", "x,y:z"])
def test_servers_start_in_a_home_with_any_characters(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    home = tmp_path_factory.mktemp("home") / name
    servers = (Postgres(home, settings=FAST), Valkey(home))
    try:
        for server in servers:
            server.start()
        with transaction(servers[0].url()) as connection:
            assert connection.scalar(text("SELECT 7")) == 7
        with redis.Redis.from_url(servers[1].url) as client:
            assert client.config_get("dir") == {"dir": str(home / "redis")}
    finally:
        for server in servers:
            server.stop()


def test_an_embedded_postgres_listens_where_its_url_says_despite_pgport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPORT", "6432")
    server = Postgres(tmp_path, settings=FAST)
    try:
        server.start()
        assert Path(server.socket).is_socket()
    finally:
        server.stop()


@pytest.mark.parametrize("url", [None, "postgresql://db/shardline"])
def test_pg_variables_stay_only_for_a_database_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | None
) -> None:
    monkeypatch.setenv("PGHOSTADDR", "192.0.2.1")
    if url is not None:
        monkeypatch.setenv("SHARDLINE_DATABASE_URL", url)
    settings = StandaloneSettings(home=tmp_path)
    with StateDir(tmp_path).lock(), pytest.raises(AlreadyUp):
        Supervisor(settings, print).run()
    assert ("PGHOSTADDR" in os.environ) == (url is not None)


def test_two_free_ports_can_both_be_used() -> None:
    assert free_port() > 1023
