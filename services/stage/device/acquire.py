"""Takes the device that SHARDLINE_DEVICE names, or the best free one of a kind."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog

from services.stage.device import cpu
from services.stage.device.accelerator import Accelerator, accelerators, find, is_type
from services.stage.device.device import Device
from services.stage.device.locks import holder
from services.stage.ranks.processes import OtherRanks, start_ranks
from shardline.base.errors import Invalid
from shardline_server.host import cgroup
from shardline_server.host.cores import FIELD, show_cores
from shardline_server.host.threads import stand_back

AUTO = "auto"
CORES = "cpu"
TRIES = 8
"""Of cores that were free a moment before: workers that start together meet."""
LOCK_FOLDER = Path(tempfile.gettempdir()) / "shardline-locks"

log = structlog.get_logger(__name__)


def acquire(
    name: str,
    *,
    worker: str,
    lock_folder: Path = LOCK_FOLDER,
    shared: bool = False,
    num_cores: int | None = None,
    num_ranks: int = 1,
    nice: int = 0,
) -> Device:
    """Locks the device; pins this process to it if it is a set of cores, of which a kind alone
    takes `num_cores`, which `num_ranks` ranks divide, and where compute threads have the nice value
    `nice`; an accelerator takes no notice of these.

    Raises Invalid for a name that is not a device here, and, naming the holder, if another worker
    holds it.
    """
    device = _lock(name, worker, lock_folder, shared=shared, num_cores=num_cores)
    if isinstance(device, cpu.Cpu):
        _warn_beyond_quota(device)
        device.nice = nice
        device.ranks = _occupy(device, num_ranks)
    return device


def _lock(
    name: str,
    worker: str,
    lock_folder: Path,
    *,
    shared: bool,
    num_cores: int | None,
) -> Device:
    cores = partial(cpu.Cpu, worker=worker, folder=lock_folder, shared=shared)
    if name.startswith(CORES) and name != CORES:
        return cores(name)
    if name == CORES:
        return _free_cores(cores, lock_folder, shared=shared, num=num_cores)
    if name == AUTO or is_type(name):
        device = _free_accelerator(name, worker, lock_folder, shared=shared)
        return device or _free_cores(cores, lock_folder, shared=shared, num=num_cores)
    return Accelerator(find(name), worker=worker, folder=lock_folder, shared=shared)


def _warn_beyond_quota(device: cpu.Cpu) -> None:
    quota = cgroup.cpu_quota()
    if quota < len(device.cores):
        log.warning(
            "the CPU quota is less than this stage's cores, which will all be stopped for a part "
            "of each period: raise the quota, give the container cores of its own instead, or "
            "name fewer",
            device=device.name,
            quota_cores=round(quota, 2),
        )


def _occupy(device: cpu.Cpu, num_ranks: int) -> OtherRanks | None:
    """Pins this process to its part of the cores and starts a rank on each other part. Raises
    Invalid if there are fewer cores than ranks; then the device is free again."""
    if len(device.cores) < num_ranks:
        device.release()
        problem = f"{device.name} has {len(device.cores)} cores for {num_ranks} ranks"
        raise Invalid("SHARDLINE_TP", problem, "Give it more, or lower it")
    mine, *others = cpu.parts(device.cores, num_ranks)
    cpu.pin(mine)
    ranks = start_ranks(others) if others else None
    for pid in ranks.pids if ranks else ():
        stand_back(device.nice, thread=pid)
    return ranks


def _free_accelerator(kind: str, worker: str, lock_folder: Path, *, shared: bool) -> Device | None:
    """Returns the free one with most memory. What others share is as good as free to one that
    shares.

    Raises Invalid if none of the kind is free, but None if cores will do as well.
    """
    here = [found for found in accelerators() if kind in (AUTO, found.type)]
    for found in here:
        try:
            return Accelerator(found, worker=worker, folder=lock_folder, shared=shared)
        except Invalid as error:
            _only_taken(error)
            log.info("an accelerator is not free", device=found.name, problem=error.problem)
    if kind != AUTO:
        raise Invalid(
            FIELD,
            f"none of {len(here)} {kind} devices here is free",
            "Start fewer workers, or let this one use cores",
        )
    log.warning("no accelerator is free: this stage runs on cores", accelerators=len(here))
    return None


def _free_cores(
    cores: Callable[[str], Device], lock_folder: Path, *, shared: bool, num: int | None
) -> Device:
    """Those that `cores` takes by their name."""
    for _ in range(TRIES):
        name = _cores(lock_folder, shared=shared, num=num)
        try:
            return cores(name)
        except Invalid as error:  # another worker took one of them since
            _only_taken(error)
            log.info("cores are not free any more", device=name, problem=error.problem)
    raise Invalid(
        FIELD,
        f"no device was free for long enough in {TRIES} tries",
        "Start fewer workers, or name a device",
    )


def _only_taken(error: Invalid) -> None:
    """Raises `error` again if it is about the folder of locks: no other device helps then."""
    if error.field != FIELD:
        raise error


def _cores(lock_folder: Path, *, shared: bool, num: int | None) -> str:
    """Returns `num` free cores, or all that are free and within the CPU quota; without them any, if
    they may be shared."""
    usable = cpu.usable_cores()
    free = tuple(core for core in usable if holder(lock_folder, cpu.lock_name(core)) is None)
    if len(free) >= (num or 1):
        return f"cpu:{show_cores(free[:num] if num else cgroup.within_quota(free))}"
    if not shared:
        problem = (
            f"{len(free)} of {len(usable)} cores of this machine are free, {num or 1} are asked for"
        )
        raise Invalid(FIELD, problem, "Stop a worker, name a device, or set SHARDLINE_STAGE_CORES")
    # By chance, so that those that share spread.
    chosen = random.sample(usable, min(num or len(usable), len(usable)))
    return f"cpu:{show_cores(tuple(sorted(chosen)))}"
