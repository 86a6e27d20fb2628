"""A sender of jobs that wait for others, with the texts of these in their prompts. Knows no row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx

from tests.chaos.load.requests import MODEL
from tests.chaos.load.tenants.actor import TenantActor
from tests.chaos.load.tenants.ledger import MARK, JobFamily

MAX_PARENTS = 3
FAILING = 0.25
"""Share of families in which a parent expires before it may begin."""
ANYWAY = 0.5
GRANDCHILD = 0.3
NO_TIME = {"delay_s": 60.0, "deadline_s": 0.5}
CHILD = {"model": MODEL, "max_tokens": 8, "ignore_eos": True, "temperature": 0.0, "seed": 5}


@dataclass(slots=True, kw_only=True)
class FamilySender(TenantActor):
    """One family at a time, to its end."""

    def act(self, http: httpx.Client) -> None:
        """Parents, a child, perhaps a child of the child."""
        num = self.rng.randint(1, MAX_PARENTS)
        failing = 0 if self.rng.random() < FAILING else None
        parents = [self._parent(http, fails=place == failing) for place in range(num)]
        if None in parents:
            return
        parent_ids = [parent for parent in parents if parent is not None]
        runs_anyway = self.rng.random() < ANYWAY
        child = self._child(http, parent_ids, runs_anyway=runs_anyway)
        if child is None:
            return
        ids = [*parent_ids, child.child]
        if self.rng.random() < GRANDCHILD:
            last = self._child(http, [child.child], runs_anyway=not runs_anyway)
            ids += [] if last is None else [last.child]
        self.wait_for_ends(ids)
        for family in self.ledger.families[-2:]:
            if family.child in ids:
                family.prompt_ids = self._tokenized(http, family)

    def _parent(self, http: httpx.Client, *, fails: bool) -> UUID | None:
        fields = self.fields(self.draw(), "expired" if fails else "succeeded")
        return self.submit(http, {**fields, **NO_TIME} if fails else fields)

    def _child(
        self, http: httpx.Client, parents: list[UUID], *, runs_anyway: bool
    ) -> JobFamily | None:
        names = _names(parents)
        fields = {
            **self.fields(0),
            **CHILD,
            "prompt": template(parents),
            "depends_on": [{"job": str(job_id), "as": name} for name, job_id in names.items()],
            "on_parent_failure": "run" if runs_anyway else "fail",
            "metadata": {"asked_by": MARK},
        }
        child = self.submit(http, fields)
        if child is None:
            return None
        family = JobFamily(child=child, parents=parents, runs_anyway=runs_anyway)
        self.ledger.families.append(family)
        return family

    def _tokenized(self, http: httpx.Client, family: JobFamily) -> list[int] | None:
        """What the door says of the prompt with the texts that it has for the parents."""
        text = template(family.parents)
        for name, job_id in _names(family.parents).items():
            told = self.ask(http, "GET", f"/v1/jobs/{job_id}")
            if told is None:
                return None
            said = told["result"]["text"] if told["state"] == "succeeded" else ""
            text = text.replace(f"{{{{{name}}}}}", said)
        answer = self.ask(http, "POST", "/tokenize", json={"model": MODEL, "prompt": text})
        return None if answer is None else list(answer["tokens"])


def template(parents: Any) -> str:
    """A prompt with a place for each parent's text."""
    return " + ".join(f"{{{{{name}}}}}" for name in _names(parents)) + " ="


def _names(parents: Any) -> Mapping[str, UUID]:
    return {f"part_{place}": job_id for place, job_id in enumerate(parents)}
