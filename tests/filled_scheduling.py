"""Which worker of pytest-xdist runs what: two start stacks, whose waits leave cores idle, and a
third computes beside them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

FILLING = ("tests/conformance/", "tests/simulation/", "tests/unit/")
"""Files that start no stack: they only compute."""

LEAST_WORKERS = 3
FILLER_NICE = 10
"""Of the last worker, so that stacks have the cores when they want them."""


class FilledScheduling(LoadGroupScheduling):
    """Groups in their order. Of three workers or more the last one takes those that only compute,
    from the end, and stops when none is left."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if is_filler(node.gateway.id, self.numnodes):
            group = next(filter(self._is_filling, reversed(self.workqueue)), None)
            if group is None:
                node.shutdown()
                return
            self.workqueue.move_to_end(group, last=False)
        super()._assign_work_unit(node)

    def _is_filling(self, group: str) -> bool:
        tests: Mapping[str, bool] = self.workqueue[group]
        return all(test.startswith(FILLING) for test in tests)


def is_filler(worker: str, num_workers: int) -> bool:
    """Whether a worker's files only compute."""
    return num_workers >= LEAST_WORKERS and worker == f"gw{num_workers - 1}"


def stand_back() -> None:
    """Leaves the cores to others if this process is the worker that computes beside stacks."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if is_filler(worker, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))):
        os.nice(FILLER_NICE)
