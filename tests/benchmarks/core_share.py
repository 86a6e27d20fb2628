"""A stage on a part of a core: its process joins a control group that gives it a share of one
core's time.

Whoever starts the process makes the group; the process joins by loading this module, as
SHARDLINE_DEVICE_MODULE, before it measures or computes anything. Needs the right to make control
groups, which root has. Was run with control groups of version 1; of version 2 the root must hand
the controller cpu down.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.stage.device.accelerator import MODULE_FIELD

FOLDER = "SHARDLINE_BENCH_GROUP"
VERSION_1 = Path("/sys/fs/cgroup/cpu")
VERSION_2 = Path("/sys/fs/cgroup")
PERIOD_US = 2_000
"""Of each, the group has its share. A quota is 1 ms at least, and a step should have many
periods."""


@contextmanager
def share_of_core(share: float) -> Iterator[tuple[tuple[str, str], ...]]:
    """Gives the environment with which a process of `services.stage` or `bare` gets this share, 0.5
    or more.

    Raises OSError where no group can be made. The processes must have ended when it is left.
    """
    root = VERSION_1 if VERSION_1.is_dir() else VERSION_2
    folder = Path(tempfile.mkdtemp(prefix="shardline-", dir=root))
    quota_us = round(share * PERIOD_US)
    try:
        if root == VERSION_1:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        yield ((MODULE_FIELD, __name__), (FOLDER, str(folder)), ("SHARDLINE_DEVICE_SHARED", "true"))
    finally:
        folder.rmdir()


if FOLDER in os.environ:
    (Path(os.environ[FOLDER]) / "cgroup.procs").write_text(str(os.getpid()))
