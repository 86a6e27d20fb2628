"""A relay as operators run it: a process of its own, on real servers. Waits on events and ends what
it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from celery import Celery
from redis import Redis
from sqlalchemy import Engine
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from shardline.base.config import Settings
from shardline.contract.job import Job, JobState
from shardline.contract.keys import INTAKE_DEAD
from shardline.contract.queues import INTAKE_QUEUE, SUBMIT_TASK, celery_settings, generate_queue
from shardline.contract.tables import DONE_CHANNEL
from shardline.store import jobs, models
from shardline.store.connection.notify import listening
from tests.forked import ForkedProgram
from tests.integration.rows import MODEL, claim, database_with_head, model_row, state
from tests.polling import until
from tests.repository import REPOSITORY

PATIENCE_S = 30.0
TIME_SCALE = 0.2


@dataclass(slots=True, kw_only=True)
class RelayProcess:
    """One running relay."""

    process: subprocess.Popen[bytes] | ForkedProgram
    log: Path

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def stop(self) -> int:
        """Warm shutdown; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@dataclass(slots=True, kw_only=True)
class RelayStack:
    """Real servers, a model with words as tokens, and a producer's Celery app."""

    database_url: str
    redis_url: str
    engine: Engine
    redis: Redis
    app: Celery
    folder: Path
    relays: list[RelayProcess]
    variables: dict[str, str] = field(default_factory=dict)
    """Settings of relays, beside those of every test."""

    def start_relay(self, wait: bool = True, program: Sequence[str] = ()) -> RelayProcess:
        """A relay process; ready when it answers a ping. `program` is another way to run one, with
        Python's own start."""
        log = self.folder / f"relay-{len(self.relays)}.log"
        environment = {
            **os.environ,
            "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'shared'}",
            "SHARDLINE_DATABASE_URL": self.database_url,
            "SHARDLINE_REDIS_URL": self.redis_url,
            "SHARDLINE_RESULT_BACKEND": self.redis_url,
            "SHARDLINE_TIME_SCALE": str(TIME_SCALE),
            "SHARDLINE_LOG_FORMAT": "json",
            **self.variables,
        }
        relay = RelayProcess(process=_started(program, environment, log), log=log)
        self.relays.append(relay)
        if wait:
            name = f"relay-{relay.process.pid}@"
            until(lambda: any(name in answer for answer in self._pings()))
        return relay

    def _pings(self) -> list[str]:
        """Names of the workers that answer. On a fresh connection: Celery's pools outlive the
        servers of a test."""
        with self.app.connection_for_write() as connection:
            return [
                name
                for reply in self.app.control.ping(timeout=0.3, connection=connection)
                for name in reply
            ]

    def active_tasks(self) -> list[str]:
        """Ids of the tasks that relays hold, as Celery's inspection says."""
        with self.app.connection_for_write() as connection:
            found = self.app.control.inspect(timeout=0.3, connection=connection).active() or {}
        return [task["id"] for tasks in found.values() for task in tasks]

    def submit(self, document: dict[str, Any], task_id: str | None = None) -> str:
        """As another service does."""
        with self.app.connection_for_write() as connection:
            sent = self.app.send_task(
                SUBMIT_TASK,
                kwargs=document,
                task_id=task_id,
                queue=INTAKE_QUEUE,
                connection=connection,
            )
        return str(sent.id)

    def dead_letters(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Entries of the dead-letter stream."""
        entries: Any = self.redis.xrange(INTAKE_DEAD)
        return list(entries)

    def job(self, job_id: UUID | str) -> Job | None:
        """The committed row."""
        with self.engine.begin() as connection:
            return jobs.get_job(connection, UUID(str(job_id)))

    def wait_for(self, job_id: UUID | str, condition: Callable[[Job], Any]) -> Job:
        """The job, once it is so."""

        def seen() -> Job | None:
            job = self.job(job_id)
            return job if job is not None and condition(job) else None

        job = until(seen)
        assert job is not None
        return job

    def wait_for_end(self, job_id: UUID | str) -> Job:
        """The job in a terminal state."""
        with listening(self.database_url, DONE_CHANNEL):
            return self.wait_for(job_id, lambda job: job.state.terminal)

    def take_messages(self, num: int) -> list[str]:
        """Job ids from the model's queue, as a head consumes them."""
        taken: list[str] = []

        def note(body: Any, message: Any) -> None:
            taken.append(message.headers["id"])
            message.ack()

        with self.app.connection_for_read() as connection:
            queue = (
                self.app.amqp.queues.select_add(generate_queue(MODEL))
                or self.app.amqp.queues[generate_queue(MODEL)]
            )
            with self.app.amqp.Consumer(connection, [queue], callbacks=[note]) as consumer:
                consumer.qos(prefetch_count=0)
                while len(taken) < num:
                    connection.drain_events(timeout=PATIENCE_S)
        return taken

    def claim(self, job_id: UUID | str) -> bool:
        """By head `p`. False: it is queued no more."""
        wanted = UUID(str(job_id))

        def answer() -> object:
            return claim(self.engine, [wanted]) or state(self.engine, wanted) is not JobState.QUEUED

        return isinstance(until(answer), list)


def _started(
    program: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes] | ForkedProgram:
    if not program:
        return ForkedProgram(["services.relay"], environment=environment, log=log)
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *program],
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=output,
        )


@contextmanager
def relay_stack(database_url: str, redis_url: str, folder: Path) -> Iterator[RelayStack]:
    """Everything but a relay; ends the relays that the test started."""
    settings = Settings(redis_url=redis_url, result_backend=redis_url)
    app = Celery("producer", set_as_current=False)
    app.conf.update(celery_settings(settings))
    app.conf.broker_transport_options["socket_timeout"] = 10
    with database_with_head(database_url) as engine, Redis.from_url(redis_url) as redis:
        with engine.begin() as connection:
            models.register_model(connection, {**model_row(MODEL), "tokenizer": words_tokenizer()})
        here = RelayStack(
            database_url=database_url,
            redis_url=redis_url,
            engine=engine,
            redis=redis,
            app=app,
            folder=folder,
            relays=[],
        )
        try:
            yield here
        finally:
            for relay in here.relays:
                relay.kill()
            app.close()


def words_tokenizer() -> str:
    """One token for each of a few words."""
    vocabulary = {word: number for number, word in enumerate(["?", "end", "one", "two", "three"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    return str(tokenizer.to_str())
