"""Takes the device that SHARDLINE_DEVICE names, or the best free one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import structlog

from services.stage.device import cpu
from services.stage.device.accelerator import Accelerator, accelerators, find
from services.stage.device.device import FIELD, Device
from services.stage.device.locks import holder
from shardline.errors import Invalid

AUTO = "auto"
TRIES = 8
"""Of cores that were free a moment before: workers that start together meet."""
LOCK_FOLDER = Path(tempfile.gettempdir()) / "shardline-locks"

log = structlog.get_logger(__name__)


def take(name: str, *, worker: str, lock_folder: Path = LOCK_FOLDER, shared: bool = False) -> Device:
    """Locks the device; pins this process to it if it is a set of cores.

    Raises Invalid for a name that is not a device here, and, naming the holder, if another worker holds it.
    """
    if name == AUTO:
        return _best_free(worker, lock_folder, shared=shared)
    if name.startswith("cpu"):
        return cpu.Cpu(name, worker=worker, folder=lock_folder, shared=shared)
    return Accelerator(find(name), worker=worker, folder=lock_folder, shared=shared)


def _best_free(worker: str, lock_folder: Path, *, shared: bool) -> Device:
    """The accelerator with most memory that nobody holds; else all cores that nobody holds. What others share is as
    good as free to one that shares."""
    here = accelerators()
    for found in here:
        try:
            return Accelerator(found, worker=worker, folder=lock_folder, shared=shared)
        except Invalid as error:
            log.info("an accelerator is not free", device=found.name, problem=error.problem)
    for _ in range(TRIES):
        name = _cores(lock_folder, shared=shared)
        try:
            device = cpu.Cpu(name, worker=worker, folder=lock_folder, shared=shared)
        except Invalid as error:  # another worker took one of them since
            log.info("cores are not free any more", device=name, problem=error.problem)
            continue
        log.warning("no accelerator is free: this stage runs on cores", device=name, accelerators=len(here))
        return device
    raise Invalid(
        FIELD, f"no device was free for long enough in {TRIES} tries", "Start fewer workers, or name a device"
    )


def _cores(lock_folder: Path, *, shared: bool) -> str:
    """The free cores; without any, all of them if they may be shared."""
    usable = cpu.usable_cores()
    free = tuple(core for core in usable if holder(lock_folder, cpu.lock_name(core)) is None)
    if not free and not shared:
        raise Invalid(FIELD, "every core and accelerator of this machine is held", "Stop a worker, or name a device")
    return f"cpu:{cpu.show_cores(free or usable)}"
