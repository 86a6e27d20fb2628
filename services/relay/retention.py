"""Deletes ended jobs, and old acts of the audit log, after their retention periods. What may be
deleted is decided in shardline_server.store.retention."""

from __future__ import annotations

import structlog
from sqlalchemy.exc import DBAPIError

from services.relay.loop import Loop, LoopContext
from shardline.store import audit
from shardline.store.connection.database import failure_of
from shardline_server.store import retention

log = structlog.get_logger(__name__)

DAY_S = 86_400.0
NOTICE_DAYS = 7.0
"""From the first warning to the first deletion, where no setting states how long jobs are kept."""

TURNS_APART = 60
"""Polls between two checks, when nothing is left to delete."""


class Retention(Loop):
    """Deletes in small transactions, so that running jobs are not delayed. `days` 0 keeps all jobs.
    Where `days` is the default, it warns for a week before it deletes for the first time.
    `audit_days` 0 keeps all acts."""

    def __init__(
        self, context: LoopContext, *, days: float, is_default: bool, audit_days: float = 0.0
    ) -> None:
        super().__init__("retention", context.metrics.errors)
        self._database = context.database
        self._days = days
        self._is_default = is_default
        self._audit_days = audit_days
        self._poll_s = context.times.poll_s
        self._pause_s = TURNS_APART * self._poll_s
        self._metrics = context.metrics
        self._after: retention.Place | None = None
        self._num_kept = 0
        self._told_kept = 0
        """How many this pass came upon that foreign keys keep, and an earlier one told of."""
        self._kept_by: str | None = None

    def turn(self) -> float:
        """Delete one batch."""
        has_more_files = self._after is None and self._prune()
        pause_s = 0.0 if has_more_files else self._pause_s
        if not self._may_delete():
            return pause_s
        with self._database.begin() as connection:
            batch = retention.delete_old(connection, age_s=self._days * DAY_S, after=self._after)
        self._after = batch.after
        if batch.num_deleted:
            self._metrics.deleted.inc(batch.num_deleted)
            log.info("old jobs deleted", jobs=batch.num_deleted)
        self._note_kept(batch)
        if batch.after is None:
            return pause_s
        # Each pass comes upon those that are kept again, one by one.
        return self._poll_s if batch.kept.num else 0.0

    def _note_kept(self, batch: retention.Batch) -> None:
        """Warns once, and again when a pass came upon another number of them."""
        self._num_kept += batch.kept.num
        self._kept_by = batch.kept.why or self._kept_by
        if batch.after is not None:
            return
        if self._num_kept and self._num_kept != self._told_kept:
            log.warning(
                "old rows are kept by foreign keys: let them say ON DELETE CASCADE or SET NULL",
                rows=self._num_kept,
                error=self._kept_by,
            )
        self._told_kept = self._num_kept
        self._num_kept = 0

    def _prune(self) -> bool:
        """Returns whether more files may go. What Postgres refuses keeps no job from being
        deleted."""
        try:
            with self._database.begin() as connection:
                retention.prune(connection)
                if self._audit_days:
                    audit.delete_old(connection, age_s=self._audit_days * DAY_S)
            with self._database.begin() as connection:
                return retention.prune_files(connection)
        except DBAPIError as error:
            if failure_of(error).is_lost:
                raise
            self._tell(error)
            return False

    def _may_delete(self) -> bool:
        if not self._days:
            return False
        if not self._is_default:
            return True
        with self._database.begin() as connection:
            since_s = retention.announced_s(connection, age_s=self._days * DAY_S)
        if since_s is None:
            return False
        left_days = NOTICE_DAYS - since_s / DAY_S
        if left_days > 0:
            log.warning(
                "ended jobs will be deleted: "
                "set SHARDLINE_RETENTION_DAYS on the relays, 0 to keep all",
                older_than_days=self._days,
                begins_in_days=round(left_days, 1),
            )
        return left_days <= 0
