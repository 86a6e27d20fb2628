"""The device of one worker: what `SHARDLINE_DEVICE` means, its locks, its pinned cores, its memory, its dtypes.

Knows no model. One worker has one device; a CPU device is a set of cores.
"""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import structlog
import torch

from services.stage.device.locks import DeviceLocks
from services.stage.device.promises import Promises
from shardline.errors import Invalid

INT8 = "int8"
"""The dtype of weights whose activations and KV are bfloat16."""
FIELD = "SHARDLINE_DEVICE"
FORMS = "Write cpu:0, cpu:0-3, cpu:0,2, cuda:0 or a GPU's UUID"
LOCK_FOLDER = Path(tempfile.gettempdir()) / "shardline-locks"
MAX_CORES = 4096
CGROUP = Path("/sys/fs/cgroup")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that this process holds until it calls `release` or ends."""

    name: str
    torch_device: torch.device
    cores: tuple[int, ...]
    """Empty for a GPU."""
    num_threads: int
    is_shared: bool
    locks: DeviceLocks
    promises: Promises

    @classmethod
    def take(cls, name: str, *, worker: str, lock_folder: Path = LOCK_FOLDER, shared: bool = False) -> Device:
        """Locks the device and pins this process to it.

        Raises Invalid for a name that is not a device here, and, naming the holder, if another worker holds it.
        """
        cores = parse_cores(name)
        _check_usable(cores)
        gpu = None if cores else _find_gpu(name)
        names = [f"core-{core}" for core in cores] if gpu is None else [f"gpu-{gpu[1]}"]
        locks = DeviceLocks(lock_folder, names, worker=worker, shared=shared)
        if gpu is None:
            _pin(cores)
        else:
            torch.cuda.set_device(gpu[0])
        if shared:
            log.warning("this stage shares its device with others; it runs slower", device=name)
        return cls(
            name=name,
            torch_device=torch.device("cpu") if gpu is None else torch.device("cuda", gpu[0]),
            cores=cores,
            num_threads=torch.get_num_threads(),
            is_shared=shared,
            locks=locks,
            promises=Promises(lock_folder),
        )

    @property
    def is_cpu(self) -> bool:
        """Whether the device is a set of cores, not a GPU."""
        return self.torch_device.type == "cpu"

    def release(self) -> None:
        """Releases the locks, so that other workers may take the device."""
        self.promises.release()
        self.locks.release()

    def available_bytes(self) -> int:
        """Returns the free memory; on the CPU less what other stages of this host have promised to take."""
        if not self.is_cpu:
            return int(torch.cuda.mem_get_info(self.torch_device)[0])
        of_host = psutil.virtual_memory().available - self.promises.others()
        return max(0, min(of_host, _cgroup_available_bytes() - self.promises.others(same_cgroup=True)))

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of activations and KV. Raises Invalid if this device does not serve `name`."""
        allowed = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        allowed |= {INT8: torch.bfloat16} if self.is_cpu else {"float16": torch.float16}
        if name not in allowed:
            raise Invalid("SHARDLINE_DTYPE", f"{name!r} is not served on {self.name}", f"Use {' or '.join(allowed)}")
        return allowed[name]


def parse_cores(name: str) -> tuple[int, ...]:
    """Returns the cores in a device's name: `cpu:0-3` → (0, 1, 2, 3); none for a GPU. Raises Invalid otherwise."""
    if re.fullmatch(r"cuda:\d+|(GPU-)?[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", name):
        return ()
    cores: set[int] = set()
    for part in name.removeprefix("cpu:").split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        if match is None or not name.startswith("cpu:"):
            raise Invalid(FIELD, f"{name!r} is not a device", FORMS)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < MAX_CORES:
            raise Invalid(FIELD, f"{part!r} is not a range of cores (0-{MAX_CORES - 1}, first ≤ last)", FORMS)
        cores |= set(range(first, last + 1))
    return tuple(sorted(cores))


def show_cores(cores: tuple[int, ...]) -> str:
    """Formats cores as ranges: (0, 1, 2, 5) → `0-2,5`."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _check_usable(cores: tuple[int, ...]) -> None:
    usable = _usable_cores()
    absent = tuple(core for core in cores if core not in usable)
    if absent:
        raise Invalid(FIELD, f"no core {show_cores(absent)} here", f"Use cores among {show_cores(usable)}")


def _pin(cores: tuple[int, ...]) -> None:
    """Pins every thread of this process, also those of libraries, and sets as many compute threads as cores."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)
    torch.set_num_threads(len(cores))


def _usable_cores() -> tuple[int, ...]:
    """The cores that this container may use: those of its cgroup, not those that an earlier `_pin` left."""
    try:
        text = (CGROUP / "cpuset.cpus.effective").read_text(encoding="ascii").strip()
        return parse_cores(f"cpu:{text}")
    except (OSError, Invalid):
        return tuple(range(os.cpu_count() or 1))


def _find_gpu(name: str) -> tuple[int, str]:
    """Index and UUID: locks go by UUID, since containers number their GPUs from 0."""
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if name.startswith("cuda:"):
        index = int(name.removeprefix("cuda:"))
        if index < len(uuids):
            return index, uuids[index]
    elif name.removeprefix("GPU-").lower() in uuids:
        return uuids.index(name.removeprefix("GPU-").lower()), name.removeprefix("GPU-").lower()
    raise Invalid(FIELD, f"no GPU {name} here ({len(uuids)} found)", "Check nvidia-smi -L and the container's GPUs")


def _cgroup_available_bytes() -> int:
    """What the container's memory limit leaves. Page cache that can be dropped counts as free."""
    try:
        limit = int((CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 2**63 - 1
