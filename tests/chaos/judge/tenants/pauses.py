"""Whether pauses held: nothing that one is for begins while it surely lasts. Knows no server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.chaos.judge.tenants.rows import Row
from tests.chaos.load.tenants.ledger import HeldPause


def broken_pauses(pauses: Sequence[HeldPause], attempts: Sequence[Row]) -> Iterator[str]:
    """Yields attempts that began after a pause was acknowledged and before its resumption was asked
    for. An attempt's time is that of its claim's beginning, which saw the pause then."""
    for pause in pauses:
        for attempt in attempts:
            if not _is_meant(pause, attempt) or attempt["started_at"] <= pause.acknowledged_at:
                continue
            if pause.resume_asked_at is None or attempt["started_at"] < pause.resume_asked_at:
                after = attempt["started_at"] - pause.acknowledged_at
                yield (
                    f"job {attempt['job_id']} began (fence {attempt['fence']}) {after} after the"
                    f" pause of {pause.kind} {pause.target}"
                )


def _is_meant(pause: HeldPause, attempt: Row) -> bool:
    if pause.kind == "tenant":
        return bool(attempt["tenant_id"] == pause.target)
    key, _, value = pause.target.partition("=")
    return bool(attempt["metadata"].get(key) == value)
