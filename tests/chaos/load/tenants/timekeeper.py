"""An owner of schedules that fire each minute, and are deleted when the load ends. Knows no row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tests.chaos.load.tenants.actor import TenantActor
from tests.chaos.load.tenants.ledger import TimedSchedule

ROUTE = "/v1/schedules"
EACH_MINUTE = "* * * * *"
MAX_SCHEDULES = 6
MADE = 0.2
"""Share of rounds that make one, until there are enough."""
REMOVE = "DELETE FROM schedules WHERE tenant_id = %s AND name = %s"
NUM_OPEN = """
SELECT count(*) FROM jobs WHERE metadata ? 'schedule' AND tenant_id = %s AND finished_at IS NULL
"""


@dataclass(slots=True, kw_only=True)
class ScheduleOwner(TenantActor):
    """Its first schedules are there soon, the others later."""

    def act(self, http: httpx.Client) -> None:
        """Perhaps another one."""
        num = len(self.ledger.schedules)
        if num < 2 or (num < MAX_SCHEDULES and self.rng.random() < MADE):
            self._make(http, f"{self.rng.getrandbits(48):012x}")

    def finish(self, http: httpx.Client) -> None:  # noqa: ARG002 (it asks by SQL)
        """All are deleted, and their jobs have ended."""
        for one in self.ledger.schedules:
            one.stop_asked_at = self.moment()
            self.write(REMOVE, self.home.tenant, one.name)
        while (rows := self.rows(NUM_OPEN, self.home.tenant)) and rows[0][0]:
            self.drained.wait(self.pause_s[0])

    def _make(self, http: httpx.Client, name: str) -> None:
        request = self.fields(self.draw())
        del request["id"]
        asked = {"name": name, "cron": EACH_MINUTE, "request": request}
        self.until_answered(lambda: _made(http, asked))
        now = self.moment()
        if now is not None:
            self.ledger.schedules.append(TimedSchedule(name=name, acknowledged_at=now))


def _made(http: httpx.Client, asked: Mapping[str, Any]) -> bool:
    """Also if an answer before was lost: the name is its own."""
    answer = http.post(ROUTE, json=asked)
    if answer.status_code != httpx.codes.CONFLICT:
        answer.raise_for_status()
    return True
