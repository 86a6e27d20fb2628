"""Two loops that settle Celery tasks with ended jobs: one sends callbacks, one talks to the result
backend.

They are two, so that a backend that hangs holds up nothing but results. Own when a task is loaned,
put off and given up; what is done at an end is in `task_ends`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import structlog

from services.relay.celery.chord_backend import ChordClaimed
from services.relay.celery.task_ends import TaskEnds
from services.relay.loop import REDIS_ERRORS, Loop, LoopContext
from services.relay.submission import DOCUMENT_ERRORS
from shardline_server.failpoints import Point, failpoint
from shardline_server.store import celery_tasks
from shardline_server.store.celery_tasks import EndedTask

log = structlog.get_logger(__name__)

LEASE_S = 20.0

MAX_WAITING = 2 * celery_tasks.MAX_BATCH
"""Tasks that wait for the backend in this relay's memory; the others wait in Postgres."""

PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
"""Before a task is tried again, doubling."""

GIVE_UP_S = 86_400.0
"""Celery itself keeps results for a day: later no caller looks for one."""

MAX_REFUSALS = 3
"""Tries of callbacks that fail for another reason than the broker."""

FORGET_TURNS = 600


class TaskResults(Loop):
    """Finishes tasks at the result backend. What fails is put off alone; the others wait until the
    backend answers."""

    def __init__(self, context: LoopContext, ends: TaskEnds) -> None:
        super().__init__("task-results", context.metrics.errors)
        self._database = context.database
        self._poll_s = context.times.poll_s
        self._ends = ends
        self._waiting: deque[EndedTask] = deque()

    def offer(self, ended: EndedTask) -> bool:
        """Take a task, from another thread; False when there is no room."""
        if len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting.append(ended)
        self.wake()
        return True

    def turn(self) -> float:
        """Finish all that wait, a few for each note in Postgres."""
        while self._waiting:
            batch = [
                self._waiting.popleft()
                for _ in range(min(len(self._waiting), celery_tasks.MAX_BATCH))
            ]
            finished: list[EndedTask] = []
            try:
                while batch:
                    self._finish(batch[0], finished)
                    batch.pop(0)
            except Exception as error:
                failed, *others = batch
                self._put_off(failed, error)
                self._waiting.extendleft(reversed(others))
                raise
            finally:
                self._settle(finished)
        return self._poll_s

    def _finish(self, ended: EndedTask, finished: list[EndedTask]) -> None:
        try:
            self._ends.finish(ended)
        except ChordClaimed as claimed:
            self._put_off(ended, claimed)
        except DOCUMENT_ERRORS as error:
            # It is the task's, and not the server's: the others need not wait.
            self._errors.labels(server="none").inc()
            self._put_off(ended, error)
        else:
            finished.append(ended)

    def _settle(self, finished: Sequence[EndedTask]) -> None:
        if finished:
            failpoint(Point.TASK_ENDED)
            with self._database.begin() as connection:
                celery_tasks.settle(connection, [ended.task_id for ended in finished])

    def _put_off(self, ended: EndedTask, error: Exception) -> None:
        if ended.age_s > GIVE_UP_S:
            log.error("a Celery task's result is given up", task_id=ended.task_id, exc_info=error)
            self._settle([ended])
            return
        pause_s = min(PAUSE_S * 2.0 ** min(ended.num_failures, 10), MAX_PAUSE_S)
        log.warning(
            "a Celery task's result is not stored yet",
            task_id=ended.task_id,
            error=str(error)[:200],
        )
        with self._database.begin() as connection:
            celery_tasks.put_off(connection, [ended.task_id], pause_s=pause_s, num_failures=1)


class TaskFinisher(Loop):
    """Lends ended tasks, sends their callbacks, and gives on what the backend must hear. Ends jobs
    that `expires`."""

    def __init__(self, context: LoopContext, ends: TaskEnds, results: TaskResults) -> None:
        super().__init__("task-finisher", context.metrics.errors)
        self._database = context.database
        self._poll_s = context.times.poll_s
        self._ends = ends
        self._results = results
        self._num_turns = 0
        self._may_forget = False

    def turn(self) -> float:
        """One batch."""
        with self._database.begin() as connection:
            num_late = celery_tasks.expire(connection)
        with self._database.begin() as connection:
            leased = celery_tasks.lend(connection, lease_s=LEASE_S)
        self._finish(leased)
        self._num_turns += 1
        num_old = self._forget()
        return 0.0 if celery_tasks.MAX_BATCH in (len(leased), num_late, num_old) else self._poll_s

    def _forget(self) -> int:
        """One batch now and then, and the next one at once while there are more."""
        if self._num_turns % FORGET_TURNS == 1:
            self._may_forget = True
        if not self._may_forget:
            return 0
        with self._database.begin() as connection:
            num_old = celery_tasks.forget(connection)
        self._may_forget = num_old == celery_tasks.MAX_BATCH
        return num_old

    def _finish(self, leased: Sequence[EndedTask]) -> None:
        done: list[str] = []
        try:
            for ended in leased:
                self._finish_one(ended, done)
        finally:
            if done:
                failpoint(Point.TASK_ENDED)
                with self._database.begin() as connection:
                    celery_tasks.settle(connection, done)

    def _finish_one(self, ended: EndedTask, done: list[str]) -> None:
        """Notes it in `done` where nothing is left to do."""
        if not self._has_called_back(ended):
            self._put_off(ended)
            return
        try:
            needs_backend = self._ends.needs_backend(ended)
        except Exception as error:
            # Whatever its row holds, those behind it are handled.
            self._errors.labels(server="none").inc()
            if ended.age_s > GIVE_UP_S:
                log.exception("a Celery task's end is given up", task_id=ended.task_id)
                done.append(ended.task_id)
                return
            problem = f"{type(error).__name__}: {error}"[:200]
            log.warning("a Celery task cannot be read", task_id=ended.task_id, error=problem)
            self._put_off(ended)
            return
        if not needs_backend:
            done.append(ended.task_id)
        elif not self._results.offer(ended):
            self._put_off(ended)

    def _has_called_back(self, ended: EndedTask) -> bool:
        """One bad task must not hold up the others, nor its own result for ever."""
        try:
            self._ends.call_back(ended)
        except Exception as error:
            self._errors.labels(server="redis" if isinstance(error, REDIS_ERRORS) else "none").inc()
            is_over = not isinstance(error, REDIS_ERRORS) and ended.num_failures >= MAX_REFUSALS
            if is_over or ended.age_s > GIVE_UP_S:
                log.exception("a Celery task's callbacks are given up", task_id=ended.task_id)
                return True
            problem = f"{type(error).__name__}: {error}"[:200]
            log.warning(
                "a Celery task's callbacks are not sent yet", task_id=ended.task_id, error=problem
            )
            return False
        return True

    def _put_off(self, ended: EndedTask) -> None:
        pause_s = min(PAUSE_S * 2.0 ** min(ended.num_failures, 10), MAX_PAUSE_S)
        with self._database.begin() as connection:
            celery_tasks.put_off(connection, [ended.task_id], pause_s=pause_s, num_failures=1)
