"""An operator who pauses a tag or a tenant, and resumes it: jobs come before, meanwhile and, after
it, end. Knows no row."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

import httpx

from tests.chaos.load.doors import gateway_client
from tests.chaos.load.tenants.actor import HTTP_S, TenantActor
from tests.chaos.load.tenants.ledger import HeldPause

ROUTE = "/v1/pauses"
PAUSE = "INSERT INTO pauses (kind, target) VALUES (%s, %s) ON CONFLICT DO NOTHING"
RESUME = "DELETE FROM pauses WHERE kind = %s AND target = %s"
HOLD_S = (1.0, 5.0)
TENANT = 0.25
"""Share of pauses that are of the whole tenant."""
TAG = "held"
"""In the metadata of its jobs."""
NUM_JOBS = 2
"""Before the pause, and as many while it lasts."""


@dataclass(slots=True, kw_only=True)
class TenantPauser(TenantActor):
    """One pause at a time, by HTTP or by SQL."""

    def act(self, http: httpx.Client) -> None:
        """A pause, from its jobs to their ends."""
        name = f"{self.rng.getrandbits(48):012x}"
        is_of_tenant = self.rng.random() < TENANT
        kind, target = ("tenant", self.home.tenant) if is_of_tenant else ("tag", f"{TAG}={name}")
        sent = [self._send(http, name) for _ in range(NUM_JOBS)]
        self.pause(kind, target)
        now = self.moment()
        if now is None:
            return
        held = HeldPause(kind=kind, target=target, acknowledged_at=now)
        self.ledger.pauses.append(held)
        sent += [self._send(http, name) for _ in range(NUM_JOBS)]
        self.stopping.wait(self.rng.uniform(*HOLD_S))
        held.resume_asked_at = self.moment()
        self.resume(kind, target)
        self.wait_for_ends([job_id for job_id in sent if job_id is not None])

    def _send(self, http: httpx.Client, name: str) -> UUID | None:
        return self.submit(http, self.fields(self.draw(), **{TAG: name}))

    def pause(self, kind: str, target: str) -> None:
        """Until it is acknowledged."""
        if self.rng.random() < 0.5:
            self.write(PAUSE, kind, target)
            return
        with gateway_client(self.home.operator_urls, HTTP_S) as operator:
            self.ask(operator, "POST", ROUTE, json={"kind": kind, "target": target})

    def resume(self, kind: str, target: str) -> None:
        """Until it is acknowledged."""
        if self.rng.random() < 0.5:
            self.write(RESUME, kind, target)
            return
        with gateway_client(self.home.operator_urls, HTTP_S) as operator:
            self.until_answered(lambda: _resumed(operator, kind, target))


def _resumed(operator: httpx.Client, kind: str, target: str) -> bool:
    """Also if an answer before was lost."""
    answer = operator.delete(f"{ROUTE}/{kind}/{target}")
    if answer.status_code != httpx.codes.NOT_FOUND:
        answer.raise_for_status()
    return True
