"""The Redis of compose.yaml and of `trial`, as its command starts it with the files of `make
secrets`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from docker.kubernetes.compose import SECRETS, services
from services.standalone.ports import LOOPBACK, free_port
from services.standalone.servers import Valkey
from shardline.base.redis import redis_client
from tests.polling import until
from tests.repository import REPOSITORY


@pytest.fixture
def secret_folder(tmp_path: Path) -> Path:
    """As `make secrets` fills it."""
    subprocess.run(
        [REPOSITORY / "docker/secrets.sh", tmp_path], check=True, stdout=subprocess.DEVNULL
    )
    return tmp_path


@pytest.fixture
def port(redis_server: Valkey, secret_folder: Path) -> Iterator[int]:
    """Of a server with the arguments of Compose's, and the program of this session's."""
    port = free_port()
    _, *arguments = services()["redis"].args
    own = [each.replace(SECRETS, str(secret_folder)) for each in arguments]
    command = [
        psutil.Process(redis_server.pid).exe(),
        *own,
        "--port",
        str(port),
        "--dir",
        str(secret_folder),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        until(lambda: answer(port) is not None)
        yield port
        process.kill()


def answer(port: int) -> str | None:
    """What a server says to somebody without a password; None: there is none yet."""
    try:
        with redis.Redis(LOOPBACK, port, protocol=2) as client:
            return "PONG" if client.ping() else ""
    except redis.AuthenticationError as error:
        return str(error)
    except redis.ConnectionError:
        return None


def test_it_answers_only_who_has_the_password(port: int, secret_folder: Path) -> None:
    assert "Authentication required" in str(answer(port))
    url = (secret_folder / "redis_url").read_text().replace("redis:6379", f"{LOOPBACK}:{port}")
    with redis_client(url, timeout_s=5) as client:
        client.rpush("queue", b"message")
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "volatile-lru"}
        with pytest.raises(redis.RedisError):
            client.rpush("queue", b"x" * (17 << 20))
        assert client.llen("queue") == 1


def test_secrets_that_are_there_stay_and_the_url_has_the_servers_password(
    secret_folder: Path,
) -> None:
    before = {path.name: path.read_text() for path in secret_folder.iterdir()}
    (secret_folder / "redis_url").unlink()
    subprocess.run(
        [REPOSITORY / "docker/secrets.sh", secret_folder], check=True, stdout=subprocess.DEVNULL
    )
    assert {path.name: path.read_text() for path in secret_folder.iterdir()} == before
