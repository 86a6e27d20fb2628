"""A tenant with quotas, who asks for more than they allow, and cancels some. Knows no row."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from tests.chaos.load.tenants.actor import TenantActor

BURST = (1, 4)
CANCELLED = 0.15
"""Share of accepted jobs that are cancelled at once."""


@dataclass(slots=True, kw_only=True)
class QuotaSpender(TenantActor):
    """What is refused is not sent again: it must not be there."""

    def act(self, http: httpx.Client) -> None:
        """A burst, in which some is refused."""
        for _ in range(self.rng.randint(*BURST)):
            fields = self.fields(self.draw(), "succeeded", "cancelled")
            job_id = self.submit(http, fields)
            if job_id is not None and self.rng.random() < CANCELLED:
                self.ask(http, "DELETE", f"/v1/jobs/{job_id}")

    def finish(self, http: httpx.Client) -> None:  # noqa: ARG002 (it has nothing to ask)
        """All that was accepted has ended."""
        self.wait_for_ends(self.ledger.promised)
