"""Any accelerator that torch knows as a device: CUDA, ROCm, XPU, MPS, or a backend that
SHARDLINE_DEVICE_MODULE brings.

All is asked of torch's module for the device type (`torch.cuda`, `torch.xpu`, `torch_npu`, …): its
functions have the same names everywhere; what a module lacks has a fallback here. Knows no model.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch

from services.stage.device.cpu import free_bytes
from services.stage.device.device import INT4, INT8, Device, Meter
from services.stage.device.staging import Staging
from services.stage.device.uploads import Uploads
from services.stage.device.watts import Watts
from shardline.base.errors import Invalid
from shardline_server.host.cores import FIELD, FORMS

BUILT_IN = ("cuda", "xpu", "mps")
"""Device types of torch itself; `cuda` is also ROCm's."""
STREAM_PARTS = ("Stream", "Event", "current_stream", "stream")
"""What copies in parallel with the computation need of torch's module; mps has no streams."""
MODULE_FIELD = "SHARDLINE_DEVICE_MODULE"
UUID = re.compile(r"(?:GPU-)?([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})")
_NAME = re.compile(r"([a-z][a-z0-9_]*?):(\d{1,4})|(mps)")


@dataclass(frozen=True, slots=True)
class AcceleratorInfo:
    """An accelerator of this machine, not held yet."""

    type: str
    index: int

    @property
    def name(self) -> str:
        """What SHARDLINE_DEVICE calls it."""
        return "mps" if self.type == "mps" else f"{self.type}:{self.index}"

    @property
    def torch_device(self) -> torch.device:
        """The same for torch."""
        return torch.device(self.type, self.index)

    @property
    def module(self) -> Any:
        """torch's module for the type."""
        return torch.get_device_module(self.type)

    @property
    def uuid(self) -> str | None:
        """What names it in every container, where its backend knows that."""
        with suppress(AttributeError, RuntimeError):
            return str(self.module.get_device_properties(self.index).uuid).lower()
        return None

    @property
    def lock_name(self) -> str:
        """Locks go by UUID where there is one, since containers number their GPUs from 0."""
        return f"gpu-{self.uuid}" if self.uuid else f"{self.type}-{self.index}"

    def model(self) -> str:
        """Returns the name that its maker gave it, else its type."""
        with suppress(AttributeError, RuntimeError):
            return str(self.module.get_device_name(self.index))
        return self.type

    def total_bytes(self) -> int:
        """Returns its whole memory. Starts nothing on it where its properties tell: a CUDA context
        takes memory."""
        with suppress(AttributeError, RuntimeError):
            return int(self.module.get_device_properties(self.index).total_memory)
        return self.memory_bytes()[1]

    def memory_bytes(self) -> tuple[int, int]:
        """Returns its free and its whole memory. One that does not tell shares the host's."""
        with suppress(AttributeError, RuntimeError):
            free, total = self.module.mem_get_info(self.index)
            return int(free), int(total)
        with suppress(AttributeError, RuntimeError):  # mps
            total = int(self.module.recommended_max_memory())
            return max(0, total - int(self.module.driver_allocated_memory())), total
        memory = psutil.virtual_memory()
        return memory.available, memory.total


class Accelerator(Device):
    """One accelerator. Its host threads are not pinned."""

    dtypes: ClassVar = {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    dtype_remedies: ClassVar = dict.fromkeys(
        (INT8, INT4), "Use bfloat16 or float16, or run this stage on cores (cpu:0-3)"
    )

    def __init__(
        self, found: AcceleratorInfo, *, worker: str, folder: Path, shared: bool = False
    ) -> None:
        """Takes an accelerator. Raises Invalid, naming the holder, if another worker holds it."""
        locks = [found.lock_name]
        super().__init__(
            found.name, found.torch_device, locks, worker=worker, folder=folder, shared=shared
        )
        self._found = found
        self.enter_thread()

    def identity(self) -> list[str]:
        """Returns what its kernels are chosen by: its model and the libraries of this build of
        torch."""
        return [self._found.type, self._found.model(), torch.__version__, torch.__config__.show()]

    def available_bytes(self) -> int:
        """Returns the free memory, as its backend tells."""
        return self._found.memory_bytes()[0]

    def host_bytes(self) -> int:
        """Returns the free memory of the host or of this container, less what other stages have
        promised to take."""
        return free_bytes(self.reservations)

    def total_bytes(self) -> int:
        """Returns all of the device's memory."""
        return self._found.total_bytes()

    def meter(self) -> Meter | None:
        """Returns NVML, through nvidia-ml-py. Raises OSError, with the reason, if that does not
        tell."""
        if self._found.type != "cuda" or torch.version.hip:
            return None
        try:
            # Opened once: torch.cuda.power_draw initializes the library at each call
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{self._found.uuid}")
            nvml.nvmlDeviceGetPowerUsage(handle)
        # the driver, its library and the package may be missing, each in its own words
        except Exception as error:
            raise OSError(f"NVML does not tell: {error}") from error
        return Meter(
            "nvml", lambda elapsed_s: nvml.nvmlDeviceGetPowerUsage(handle) * 1e-3 * elapsed_s
        )

    def watts(self) -> Watts | None:
        """Returns the board power that the table has for its model."""
        return Watts.of_accelerator(self._found.model())

    def enter_thread(self) -> None:
        """Makes the device the calling thread's: a new thread has the first one, whatever others
        have chosen."""
        super().enter_thread()
        with suppress(AttributeError):  # mps has one device
            self._found.module.set_device(self._found.index)

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given."""
        self._found.module.synchronize()

    def staging(self, num_buffers: int, num_bytes: int) -> Staging | None:
        """Returns pinned buffers of `num_bytes` each; None if the backend lacks pinned memory,
        streams or events."""
        if self._module_with_streams is None or not _can_pin():
            return None
        return Staging(self._module_with_streams, self.torch_device, num_buffers, num_bytes)

    def uploads(self) -> Uploads:
        """Returns copies that run in parallel with the computation, if the backend has streams and
        events, out of pinned memory, if it has that."""
        return Uploads(self.torch_device, self._module_with_streams, pins=_can_pin())

    @property
    def _module_with_streams(self) -> Any:
        """Returns torch's module for the type; None if parallel copies lack a part of it."""
        module = self._found.module
        return module if all(hasattr(module, name) for name in STREAM_PARTS) else None


def load_module(name: str | None) -> None:
    """Imports the Python module that registers a further device type with torch, such as
    `torch_npu`.

    Raises Invalid if it cannot be imported.
    """
    if name is None:
        return
    try:
        importlib.import_module(name)
    except Exception as error:  # a backend may raise anything: its driver may be missing
        raise Invalid(
            MODULE_FIELD, f"{name} cannot be imported: {error!r}", "Install it with its driver"
        ) from error


def accelerators() -> list[AcceleratorInfo]:
    """Returns all accelerators of this machine that torch can use, those with most memory first."""
    types = {*BUILT_IN, torch._C._get_privateuse1_backend_name()}  # noqa: SLF001 (no public reader)
    found = [one for kind in sorted(types) for one in _of_type(kind)]
    return sorted(found, key=lambda one: -one.total_bytes())


def find(name: str) -> AcceleratorInfo:
    """Returns the accelerator of this name or UUID. Raises Invalid if there is none."""
    here = accelerators()
    if (uuid := UUID.fullmatch(name)) is not None:
        matching = [one for one in here if one.uuid == uuid[1].lower()]
    elif (match := _NAME.fullmatch(name)) is not None and is_type(match[1] or match[3]):
        matching = [
            one
            for one in here
            if (one.type, one.index) == (match[1] or match[3], int(match[2] or 0))
        ]
    else:
        raise Invalid(FIELD, f"{name!r} is not a device", FORMS)
    if not matching:
        others = ", ".join(one.name for one in here) or "none"
        raise Invalid(
            FIELD,
            f"no accelerator {name} here (found: {others})",
            "Check the driver, the container's devices, torch's build, "
            f"and {MODULE_FIELD} for a backend outside torch",
        )
    return matching[0]


def is_type(name: str) -> bool:
    """Whether torch knows accelerators of this type, with a device or without."""
    try:
        return torch.device(name).type == name not in {"cpu", "meta"}
    except RuntimeError:
        return False


def _can_pin() -> bool:
    """Whether the backend has pinned memory."""
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:
        return False
    return True


def _of_type(kind: str) -> Iterator[AcceleratorInfo]:
    try:
        module = torch.get_device_module(kind)
        if module.is_available():
            yield from (AcceleratorInfo(kind, index) for index in range(module.device_count()))
    except (AttributeError, RuntimeError):
        return  # this build of torch has no such device
