"""Runs the other team's worker, and notes when messages may have been lost between Redis and it.
Knows no job."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.standalone.plan import ServiceProcess

LOOK_S = 0.2
SILENCE_S = 2.0
TRIED = "canvas:tried"
TRIED_S = 60
"""A key that is written at each look, and how long it stays."""

ARGV = (
    *(
        sys.executable,
        "-m",
        "celery",
        "-A",
        "tests.chaos.load.canvas_app",
        "worker",
        "-P",
        "threads",
        "-c",
        "4",
    ),
    *("--without-gossip", "--without-mingle", "--loglevel", "WARNING"),
)

Life = tuple[str, int, int]


@dataclass(slots=True, kw_only=True)
class CanvasWorker:
    """One thread's, and one process's, which is started anew whenever it may have lost its
    place."""

    broker_url: str
    backend_url: str
    home: Path
    drained: threading.Event
    disturbed_s: list[float] = field(default_factory=list)
    """Seconds since 1970 at which Redis had lost its memory, cut connections, or did not take a
    key. Kombu has no answer to that: a message that was on its way is gone, or comes again."""

    def run(self) -> None:
        """Until the load has drained."""
        shims = {"LD_PRELOAD"}
        environment = {name: value for name, value in os.environ.items() if name not in shims}
        urls = {"CANVAS_BROKER": self.broker_url, "CANVAS_BACKEND": self.backend_url}
        worker = ServiceProcess("canvas", self.home, argv=ARGV, env={**environment, **urls})
        worker.start()
        try:
            with redis.Redis.from_url(
                self.broker_url,
                socket_timeout=SILENCE_S,
                retry=Retry(NoBackoff(), 0),
                single_connection_client=True,
            ) as client:
                self._watch(client, worker)
        finally:
            worker.kill()

    def _watch(self, client: redis.Redis, worker: ServiceProcess) -> None:
        last = _life(client)
        while not self.drained.wait(LOOK_S):
            life = _life(client)
            if life is None or life != last:
                self.disturbed_s.append(time.time())
            if life is not None and (life != last or not worker.is_running()):
                worker.kill()
                worker.start()
            last = life


def _life(client: redis.Redis) -> Life | None:
    """Which server this is, how often it was emptied, and on which connection it is asked; None: it
    does not answer, or takes no key."""
    try:
        statistics = client.info("commandstats").get("cmdstat_flushall", {"calls": 0})
        life = str(client.info("server")["run_id"]), int(statistics["calls"]), client.client_id()
        # Last: whoever sees the key knows that what happens from now on is noticed.
        client.set(TRIED, 1, ex=TRIED_S)
    except redis.RedisError:
        return None
    return life
