"""What a finding is: one violation of a promise. Knows no judge and no stack."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One violation."""

    invariant: str
    count: str
    """The field of chaos.json that it raises."""
    what: str
    job_id: UUID | None = None

    def __str__(self) -> str:
        return f"{self.invariant} {self.count}: {self.what}" + (
            f" (job {self.job_id})" if self.job_id else ""
        )
