"""The device of one worker as the rest of the stage sees it: one interface, with an implementation
for CPUs and one for accelerators.

Knows no model. One worker has one device. `acquire.py` makes them from `SHARDLINE_DEVICE`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import structlog
import torch

from services.stage.device.locks import DeviceLocks
from services.stage.device.memory_reservations import MemoryReservations
from services.stage.device.staging import Staging
from services.stage.device.uploads import Uploads
from services.stage.device.watts import Watts
from services.stage.ranks.processes import OtherRanks
from shardline.base.errors import Invalid
from shardline_server.host.threads import stand_back

INT8 = "int8"
INT4 = "int4"
"""Dtypes of weights with activations and KV in bfloat16."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Meter:
    """What measures the power of a device."""

    source: str
    """`rapl` or `nvml`."""
    spent_j: Callable[[float], float]
    """Returns the watt-seconds since its last call, which was that number of seconds ago. May raise
    anything."""


class Device(ABC):
    """A device that this process holds until it calls `release` or ends."""

    dtypes: ClassVar[dict[str, torch.dtype]]
    """The names that SHARDLINE_DTYPE may have here, and the dtypes of activations and KV that they
    mean."""
    dtype_remedies: ClassVar[dict[str, str]]
    """What to do instead, by name of a dtype that is not served."""

    def __init__(
        self,
        name: str,
        torch_device: torch.device,
        lock_names: Iterable[str],
        *,
        worker: str,
        folder: Path,
        shared: bool,
    ) -> None:
        """Locks the device. Raises Invalid, naming the holder, if another worker holds it."""
        self.name = name
        self.torch_device = torch_device
        self.locks = DeviceLocks(folder, lock_names, worker=worker, shared=shared)
        self.reservations = MemoryReservations(folder)
        self.nice = 0
        """Of threads that compute. An accelerator waits for those that launch its kernels."""
        self.ranks: OtherRanks | None = None
        """The other processes that compute its stage's layers, each on its own part of the
        device."""
        if shared:
            log.warning("this stage shares its device with others; it runs slower", device=name)

    @property
    def is_cpu(self) -> bool:
        """Whether the device is a set of cores, not an accelerator."""
        return self.torch_device.type == "cpu"

    @property
    def num_threads(self) -> int:
        """The compute threads of torch on the host."""
        return torch.get_num_threads()

    @abstractmethod
    def identity(self) -> list[str]:
        """Returns all that libraries choose their kernels by: equal lists mean equal bits, in every
        process."""

    @abstractmethod
    def available_bytes(self) -> int:
        """Returns the free memory; on the CPU less what other stages of this host have promised to
        take."""

    @abstractmethod
    def host_bytes(self) -> int:
        """Returns the free memory of the host or of this container, less what other stages have
        promised to take."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Returns the memory of the device, free or not."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the device has done all that it was given."""

    def meter(self) -> Meter | None:
        """Returns what measures its power; None without it. Raises OSError, with the reason, if
        that fails."""
        return None

    def watts(self) -> Watts | None:
        """Returns public figures of what it draws; None if there are none."""
        return None

    def enter_thread(self) -> None:
        """Makes the device the calling thread's, for what asks for none by name: a kernel's launch.
        A thread that computes calls it first."""
        # OpenMP and MKL have a number of threads for each thread that calls them; torch sets it
        # once it is asked. Until then they take all cores of the host, and on some processors
        # products have other bits.
        torch.get_num_threads()

    def stand_back(self) -> None:
        """Gives the calling thread, which computes from now on, the nice value of those that do. So
        services with little to do get these cores at once: where steps take milliseconds their
        waits for a time slice were 0.4 of the time to a first token during a full batch."""
        stand_back(self.nice)

    def staging(
        self,
        num_buffers: int,  # noqa: ARG002 (an accelerator's)
        num_bytes: int,  # noqa: ARG002 (an accelerator's)
    ) -> Staging | None:
        """Returns pinned buffers of `num_bytes` each; None where copies block: on the CPU, or
        without streams."""
        return None

    def uploads(self) -> Uploads | None:
        """Returns what copies from the host's memory to the device; None on the CPU: that memory is
        its own."""
        return None

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of activations and KV. Raises Invalid if this device does not serve
        `name`."""
        if name not in self.dtypes:
            remedy = self.dtype_remedies.get(name, f"Use {' or '.join(self.dtypes)}")
            raise Invalid("SHARDLINE_DTYPE", f"{name!r} is not served on {self.name}", remedy)
        return self.dtypes[name]

    def release(self) -> None:
        """Releases the locks, so that other workers may take the device."""
        if self.ranks is not None:
            self.ranks.close()
        self.reservations.release()
        self.locks.release()
