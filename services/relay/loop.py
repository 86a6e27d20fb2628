"""A thread that repeats its turn, whatever fails. Owns waiting, waking, backing off and stopping;
knows no duty."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass

import structlog
from kombu.exceptions import OperationalError as BrokerError
from prometheus_client import Counter
from psycopg import Error as PsycopgError
from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from tenacity import (
    RetryCallState,
    RetryError,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_when_event_set,
    wait_random_exponential,
)

from services.relay.relay_spans import RelaySpans
from shardline.base.clock import monotonic_s
from shardline.base.config import Times
from shardline.store.connection.database import failure_of
from shardline_server.metrics import RelayMetrics
from shardline_server.store.crashes import NO_CEILING, AttemptLimits
from shardline_server.tracing import OFF, Tracer

log = structlog.get_logger(__name__)

MIN_PAUSE_S = 0.01
"""From the end of a turn to the next one, however often the loop is woken: what arrives meanwhile
is handled as one batch. What wakes a loop that has rested for longer waits for nothing."""

MAX_BACKOFF_S = 2.0
STALL = 1 / 3
"""Part of a lease: after a longer silence of Postgres, or of this relay, holders get time to renew
their leases."""

POSTGRES_ERRORS = (DBAPIError, PoolTimeout, PsycopgError)
REDIS_ERRORS = (RedisError, BrokerError)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContext:
    """What all loops of one relay share."""

    database: Engine
    times: Times
    metrics: RelayMetrics
    limits: AttemptLimits = NO_CEILING
    tracer: Tracer = OFF

    @property
    def spans(self) -> RelaySpans:
        """What loops add to the traces of jobs."""
        return RelaySpans(self.database, self.tracer)


class Loop(threading.Thread, ABC):
    """One background duty of the relay."""

    def __init__(self, name: str, errors: Counter) -> None:
        super().__init__(name=name, daemon=True)
        self._errors = errors
        self._woken = threading.Event()
        self._stopped = threading.Event()
        self._patient = Retrying(
            retry=retry_if_exception_type(Exception),
            wait=wait_random_exponential(multiplier=0.1, max=MAX_BACKOFF_S),
            stop=stop_when_event_set(self._stopped),
            sleep=sleep_using_event(self._stopped),
            before_sleep=self._note,
        )

    @abstractmethod
    def turn(self) -> float:
        """Do what is due; returns the seconds until the next turn, unless woken. May raise
        anything."""

    def wake(self) -> None:
        """Start the next turn now; callable from any thread."""
        self._woken.set()

    def stop(self) -> None:
        """End the loop after this turn; callable from any thread."""
        self._stopped.set()
        self._woken.set()

    def run(self) -> None:
        """Run turns until stopped. A turn that fails is retried, with exponential back-off."""
        while not self._stopped.is_set():
            try:
                pause_s = self._patient(self.turn)
            except RetryError:
                return
            ended_s = monotonic_s()
            self._woken.wait(pause_s)
            self._stopped.wait(max(0.0, ended_s + MIN_PAUSE_S - monotonic_s()))
            self._woken.clear()

    def _note(self, state: RetryCallState) -> None:
        self._tell(state.outcome.exception() if state.outcome else None, state.attempt_number)

    def _tell(self, error: BaseException | None, num_tries: int = 1) -> None:
        """Counts and logs what failed."""
        server = (
            "postgres"
            if isinstance(error, POSTGRES_ERRORS)
            else "redis"
            if isinstance(error, REDIS_ERRORS)
            else None
        )
        self._errors.labels(server=server or "none").inc()
        failure = failure_of(error) if isinstance(error, DBAPIError) else None
        if failure and not failure.is_lost:
            details = {
                "sqlstate": failure.sqlstate,
                "error": failure.problem,
                "tries": num_tries,
            }
            log.warning("Postgres refuses a statement", loop=self.name, **details)
        elif server:
            cause = getattr(error, "orig", None) or error
            event = f"{server} unreachable"
            log.warning(
                event,
                loop=self.name,
                server=server,
                error=str(cause)[:200],
                tries=num_tries,
            )
        else:
            log.error("turn failed", loop=self.name, exc_info=error)
