"""A primary and its standby that streams from it, for tests of a failover. Owns both servers; knows
no table."""

from __future__ import annotations

import shutil
from pathlib import Path

import psycopg
from psycopg import sql

from services.standalone import processes
from services.standalone.servers import FAST, Postgres, postgres_program
from tests.polling import until


class PostgresPair:
    """Both are reached under one URL of two hosts, whichever of them takes the writes."""

    def __init__(self, home: Path, primary: Postgres | None = None) -> None:
        self.primary = primary or Postgres(home / "a", settings=FAST)
        self.standby = Postgres(home / "b", settings=FAST)
        self._folders = [self.primary.sockets, self.standby.sockets]
        self._name = home / "name"

    def start(self) -> None:
        """Both, the standby as a copy of the primary."""
        if not self.primary.is_running():
            self.primary.start()
        self._copy_to_standby()
        self.move_name()

    def end(self) -> None:
        """Both, for good."""
        self.primary.abandon()
        self.standby.abandon()

    def url(self, database: str = "shardline") -> str:
        """libpq takes the host that can write."""
        hosts = ",".join(map(str, self._folders))
        return f"postgresql://shardline@/{database}?host={hosts}&target_session_attrs=read-write"

    def url_of_name(self, database: str = "shardline") -> str:
        """One host, as behind a name that leads to one of the two; it says nothing of who can
        write."""
        return f"postgresql://shardline@/{database}?host={self._name}"

    def move_name(self) -> None:
        """From now on the name leads to the primary; connections stay where they are."""
        self._name.unlink(missing_ok=True)
        self._name.symlink_to(self.primary.sockets)

    def commit_together(self) -> None:
        """From now on the standby has what the primary acknowledges: a kill loses nothing of it."""
        _ask(self.primary, "ALTER SYSTEM SET synchronous_standby_names = '*'", has_answer=False)
        _ask(self.primary, "SELECT pg_reload_conf()")
        until(
            lambda: _ask(
                self.primary, "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
            )
        )

    def until_copied(self) -> None:
        """The standby has all that the primary has committed."""
        at = _ask(self.primary, "SELECT pg_current_wal_lsn()::text")
        until(lambda: _ask(self.standby, f"SELECT pg_last_wal_replay_lsn() >= '{at}'"))

    def promote(self) -> None:
        """The standby takes writes from now on; the old primary, which must have ended, is the
        standby's name now."""
        assert not self.primary.is_running()
        assert _ask(self.standby, "SELECT pg_promote()")
        self.primary, self.standby = self.standby, self.primary

    def fail_over(self) -> None:
        """The primary is killed once the standby has what was committed, and the standby is
        promoted."""
        self.until_copied()
        self.primary.kill()
        self.promote()

    def rejoin(self) -> None:
        """The one that ended comes back at its address as a standby of the other: it takes
        connections, not writes."""
        shutil.rmtree(self.standby.data)
        self._copy_to_standby()

    def _copy_to_standby(self) -> None:
        standby = self.standby
        standby.home.mkdir(parents=True, exist_ok=True)
        standby.data.mkdir(mode=0o700)
        standby.adopt(standby.data)
        argv = [
            str(postgres_program("pg_basebackup")),
            "--pgdata",
            str(standby.data),
            "--username",
            "shardline",
        ]
        argv += [
            "--host",
            str(self.primary.sockets),
            "--checkpoint=fast",
            "--write-recovery-conf",
            "--no-sync",
        ]
        status = processes.run(argv, log=standby.log, unprivileged=True)
        assert status == 0, standby.log_tail()
        standby.start()


def _ask(server: Postgres, question: str, *, has_answer: bool = True) -> object:
    with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
        answer = connection.execute(sql.SQL(question))
        row = answer.fetchone() if has_answer else None
        return row and row[0]
