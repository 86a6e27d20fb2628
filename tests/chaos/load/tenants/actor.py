"""What all tenants' actors do: ask until there is an answer, submit by several doors, and wait for
ends. Knows no quota, pause or schedule."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID, uuid4

import httpx
import psycopg

from shardline.contract.api_key import bearer
from tests.chaos.load.callers import code_of
from tests.chaos.load.doors import PATIENCE_S, is_refusal
from tests.chaos.load.journal import Journal
from tests.chaos.load.requests import COLUMNS
from tests.chaos.load.tenants.ledger import MARK, TenantLedger
from tests.chaos.load.workload import Workload
from tests.chaos.report.finding import Finding

BACK_S = (0.2, 1.0)
LOOK_S = 0.5
HTTP_S = 20.0
NUMBERS = (0, 2, 4, 6, 8, 10)
"""Short requests of the set."""
OVER_QUOTA = "rate_limit_exceeded"

NOW = "SELECT clock_timestamp()"
NUM_OPEN = "SELECT count(*) FROM jobs WHERE id = ANY(%s) AND finished_at IS NULL"
INSERT = """
INSERT INTO jobs (id, tenant_id, model, prompt, params, metadata, max_crashes, depends_on,
    on_parent_failure, not_before, deadline_at)
VALUES (%(id)s, %(tenant)s, %(model)s, %(prompt)s, %(params)s, %(metadata)s, %(max_crashes)s,
    %(depends_on)s, %(on_parent_failure)s, now() + make_interval(secs => %(delay_s)s),
    now() + make_interval(secs => %(deadline_s)s))
ON CONFLICT DO NOTHING
"""
OTHERS: Mapping[str, Any] = {"depends_on": None, "on_parent_failure": "fail"}
"""Columns beside COLUMNS that its rows have, with their defaults."""

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantHome:
    """Where a tenant asks, and for whom."""

    tenant: str
    urls: Mapping[str, str]
    """With the tenant's own `api_key`."""
    operator_urls: Mapping[str, str]
    """With a key of an operator."""
    database_url: str
    """Of the harness, past everything that a fault may put in between."""


@dataclass(slots=True, kw_only=True)
class TenantActor:
    """One thread's. A round is brought to its end, whatever happens meanwhile."""

    home: TenantHome
    ledger: TenantLedger
    journal: Journal
    workload: Workload
    stopping: threading.Event
    drained: threading.Event
    rng: random.Random
    pause_s: tuple[float, float] = (0.5, 2.0)
    """Between two rounds."""
    has_ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Round after round until the load stops, then what is left to do."""
        self.ledger.ends.append(self.has_ended)
        with httpx.Client(
            base_url=self.home.urls["gateway"],
            headers=bearer(self.home.urls["api_key"]),
            timeout=HTTP_S,
        ) as http:
            while not self.stopping.wait(self.rng.uniform(*self.pause_s)):
                self.act(http)
            self.finish(http)
        self.has_ended.set()
        self.drained.wait()

    def act(self, http: httpx.Client) -> None:
        """One round."""
        raise NotImplementedError

    def finish(self, http: httpx.Client) -> None:
        """What is left to do when the load stops."""

    def fields(self, number: int, *ends: str, **metadata: Any) -> dict[str, Any]:
        """A request of the set under an id of its own, which may end so."""
        known = {"asked_by": MARK, "number": number, "ends": list(ends or ("succeeded",))}
        return {
            **self.workload.requests[number],
            "id": str(uuid4()),
            "metadata": {**known, **metadata},
        }

    def draw(self) -> int:
        """The number of a short request."""
        return self.rng.choice(NUMBERS)

    def submit(self, http: httpx.Client, fields: Mapping[str, Any]) -> UUID | None:
        """By one door or another, until there is an answer. None: its quota has no room."""
        job_id = UUID(fields["id"])
        by = self._by_sql if self.rng.random() < 0.5 else self._by_http
        is_taken = self.until_answered(lambda: by(http, fields))
        if is_taken is not None:
            (self.ledger.promised if is_taken else self.ledger.refused).append(job_id)
        return job_id if is_taken else None

    def ask(
        self, http: httpx.Client, method: str, route: str, **content: Any
    ) -> Mapping[str, Any] | None:
        """Asks until there is an answer. None: there will be none."""
        found = self.until_answered(lambda: _document(http, method, route, **content))
        return found or None

    def until_answered(self, question: Callable[[], AnswerT]) -> AnswerT | None:
        """None: the load is over, or a good request was refused."""
        while not self.drained.is_set():
            try:
                return question()
            except httpx.HTTPError as error:
                if is_refusal(error):
                    told = (
                        error.response.text[:300]
                        if isinstance(error, httpx.HTTPStatusError)
                        else ""
                    )
                    self.complain("refused", f"{self.home.tenant}: {error}: {told}")
                    return None
            except (psycopg.Error, OSError):
                pass
            self.drained.wait(self.rng.uniform(*BACK_S))
        return None

    def moment(self) -> datetime | None:
        """What time it is by Postgres. None: the load is over."""
        rows = self.rows(NOW)
        return rows[0][0] if rows else None

    def wait_for_ends(self, ids: Sequence[UUID]) -> None:
        """Until these jobs have ended, or the load is over."""
        while (rows := self.rows(NUM_OPEN, list(ids))) and rows[0][0]:
            self.drained.wait(LOOK_S)

    def write(self, statement: str, *values: Any) -> None:
        """In a transaction of its own, as programs that speak SQL do; it may come twice."""

        def once() -> bool:
            with psycopg.connect(
                self.home.urls["database"],
                connect_timeout=int(PATIENCE_S),
                options="-c statement_timeout=10000",
            ) as connection:
                connection.execute(statement, values)
            return True

        self.until_answered(once)

    def complain(self, count: str, what: str) -> None:
        """An answer broke a promise."""
        self.journal.complain(Finding(invariant="I14", count=count, what=what))

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]] | None:
        """What Postgres has, past every fault. None: the load is over."""

        def once() -> list[tuple[Any, ...]]:
            with psycopg.connect(self.home.database_url, connect_timeout=2) as connection:
                return connection.execute(query, values).fetchall()

        return self.until_answered(once)

    def _by_http(self, http: httpx.Client, fields: Mapping[str, Any]) -> bool:
        answer = http.post("/v1/jobs", json=fields)
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS and code_of(answer) == OVER_QUOTA:
            return False
        answer.raise_for_status()
        return True

    def _by_sql(self, _: httpx.Client, fields: Mapping[str, Any]) -> bool:
        try:
            with psycopg.connect(
                self.home.urls["database"],
                connect_timeout=int(PATIENCE_S),
                options="-c statement_timeout=10000",
            ) as connection:
                connection.execute(INSERT, self._row(fields))
        except psycopg.errors.ConfigurationLimitExceeded:
            return False
        return True

    def _row(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        defaults = {**COLUMNS, **OTHERS}
        values = {name: fields.get(name, default) for name, default in defaults.items()}
        params = {
            name: value for name, value in fields.items() if name not in defaults and name != "id"
        }
        depends_on = values["depends_on"]
        return {
            **values,
            "id": fields["id"],
            "tenant": self.home.tenant,
            "params": json.dumps(params),
            "metadata": json.dumps(values["metadata"]),
            "depends_on": None if depends_on is None else json.dumps(depends_on),
        }


def _document(http: httpx.Client, method: str, route: str, **content: Any) -> dict[str, Any]:
    answer = http.request(method, route, **content)
    answer.raise_for_status()
    return dict(answer.json())
