"""A user who changes many jobs at once by a filter: another priority, an end, another try. Each is
asked for once more when it is done, and finds nothing left. Knows no row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tests.chaos.load.doors import is_refusal
from tests.chaos.load.tenants.actor import TenantActor
from tests.chaos.load.tenants.ledger import JobGroup

NUM_LIVE = 2
NUM_HELD = 12
NUM_AGAIN = 4
HELD_S = 3600.0
PRIORITIES = (1, 3, 7, 9)
MAX_ANSWERS = 5
"""Of one act: the first does all, the second finds nothing; beside those that were lost."""


@dataclass(slots=True, kw_only=True)
class BulkActor(TenantActor):
    """One group of jobs at a time."""

    def act(self, http: httpx.Client) -> None:
        """From its jobs to their ends."""
        group = self._send(http)
        mine = {"metadata": {"group": group.name}}
        self.change(http, group, "prioritize", {"filter": mine, "priority": group.priority})
        self.change(http, group, "cancel", {"filter": mine})
        self.wait_for_ends([*group.held, *group.live])
        again = {"metadata": {"group": group.name, "again": True}, "state": "cancelled"}
        self.change(http, group, "retry", {"filter": again})
        self.wait_for_ends(self._replays(group))

    def _send(self, http: httpx.Client) -> JobGroup:
        name = f"{self.rng.getrandbits(48):012x}"
        live = [
            self.submit(http, self.fields(self.draw(), "succeeded", "cancelled", group=name))
            for _ in range(NUM_LIVE)
        ]
        held = []
        for place in range(NUM_HELD):
            again = {"again": True} if place < NUM_AGAIN else {}
            fields = self.fields(self.draw(), "succeeded", "cancelled", group=name, **again)
            held.append(self.submit(http, {**fields, "delay_s": HELD_S}))
        found = [job_id for job_id in held if job_id is not None]
        group = JobGroup(
            name=name,
            held=found,
            live=[job_id for job_id in live if job_id is not None],
            again=found[:NUM_AGAIN],
            priority=self.rng.choice(PRIORITIES),
        )
        self.ledger.groups.append(group)
        return group

    def change(
        self, http: httpx.Client, group: JobGroup, act: str, body: Mapping[str, Any]
    ) -> None:
        """Until an answer says that nothing was left. What was answered counts, what was lost on
        its way is known to be missing."""
        group.num_unanswered[act] = 0
        total = 0

        def once() -> Mapping[str, Any]:
            try:
                answer = http.post(f"/v1/jobs/{act}", json=body)
                answer.raise_for_status()
            except httpx.HTTPError as error:
                group.num_unanswered[act] += not is_refusal(error)
                raise
            return dict(answer.json())

        for _ in range(MAX_ANSWERS):
            told = self.until_answered(once)
            if told is None:
                return
            total += told["changed"]
            if told["changed"] == 0 and not told["has_more"]:
                group.changed[act] = total
                return
        self.complain("bulk_acts", f"{act} of group {group.name} changes {total} and never all")

    def _replays(self, group: JobGroup) -> list[Any]:
        rows = self.rows("SELECT id FROM jobs WHERE replay_of = ANY(%s)", list(group.again))
        return [row[0] for row in rows or ()]
