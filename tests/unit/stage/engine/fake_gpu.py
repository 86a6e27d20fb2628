"""A GPU that is not there: the whole engine runs on torch's fake tensors, which have a device and
no values.

Any operator that is given tensors of two devices raises, as on a GPU. What only values can answer
is made up here: which tokens are largest, which experts are chosen. What reads a fake tensor's
memory raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from services.stage.attention import triton_kernels as attention_kernels
from services.stage.device.accelerator import Accelerator, AcceleratorInfo
from services.stage.engine import executor, loading
from services.stage.model import shard
from services.stage.products import triton_kernels as model_kernels
from services.stage.products import triton_products
from services.stage.sampling import triton_kernels as sampling_kernels
from tests.extensions.build import build

GIB = 1 << 30
aten = torch.ops.aten
ASKING = {
    aten._local_scalar_dense,
    aten.item,
    aten.equal,
    aten.is_nonzero,
    aten.nonzero,
    aten._unique2,
    aten.unique_dim,
}
"""Operators whose answer depends on values."""


class FakeGpu(Accelerator):
    """`cuda:0` with 8 GiB, free or not."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FakeAcceleratorInfo("cuda", 0), worker="fake", folder=folder)

    def identity(self) -> list[str]:
        """Made up."""
        return ["a fake GPU"]

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class FakeAcceleratorInfo(AcceleratorInfo):
    """What a driver would say of it."""

    @property
    def module(self) -> Any:
        """None: nothing of `torch.cuda` works here."""
        return None

    def memory_bytes(self) -> tuple[int, int]:
        """8 GiB."""
        return 8 * GIB, 8 * GIB


class Fake(FakeTensorMode):
    """Fake tensors of a device that never starts, whatever other accelerators this process
    knows."""

    avoid_device_init = True  # a property there


class Answers(TorchDispatchMode):
    """Answers what depends on values: every number is 1, every choice is the first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        given: Any = args[0] if args else None
        if packet in {aten._local_scalar_dense, aten.item}:
            return True if given.dtype is torch.bool else 1.0 if given.is_floating_point() else 1
        if packet in {aten.equal, aten.is_nonzero}:
            return True
        if packet is aten._unique2 or packet is aten.unique_dim:
            return (
                torch.empty(2, dtype=given.dtype, device=given.device),
                given.clone(),
                given.clone(),
            )
        if packet is aten.nonzero:
            return torch.empty(1, given.dim(), dtype=torch.long, device=given.device)
        if packet is aten.where and len(args) == 1:
            return tuple(
                torch.empty(1, dtype=torch.long, device=given.device) for _ in range(given.dim())
            )
        for one in args:
            if isinstance(one, FakeTensor):
                one.constant = None  # else torch would compute with it on the GPU
        return func(*args, **(kwargs or {}))


class Memory(TorchFunctionMode):
    """Refuses the address of a fake tensor; makes up values for numpy, of CPU tensors or when a
    copy is asked for.

    They shrink from call to call, as the weights do among which the sampler still chooses: it comes
    to an end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._value = 1.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], FakeTensor):
            assert func is not Tensor.data_ptr, "a kernel is given the address of a fake tensor"
            if func is Tensor.numpy:
                is_readable = args[0].device.type == "cpu" or kwargs.get("force", False)
                assert is_readable, f"numpy reads a tensor on {args[0].device}"
                self._value *= 0.8
                return np.full(args[0].shape, self._value, dtype=np.float32)
        return func(*args, **kwargs)


class Capture(TorchDispatchMode):
    """Refuses what no graph can hold: values asked for by the host, and copies from or to its
    memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        assert packet not in ASKING, f"a graph cannot hold {func}"
        assert packet is not aten.where or len(args) > 1, f"a graph cannot hold {func}"
        out = func(*args, **(kwargs or {}))
        devices = {
            one.device.type for one in (*args, out) if isinstance(one, Tensor) and one.dim() > 0
        }
        assert devices <= {"cuda"}, f"{func} works on {devices}"
        return out


class FakeRecorder:
    """Runs what it records once, as a capture would see it."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Replays by running it again."""
        self.num_recorded += 1
        with Capture():
            run()
        return run


class Launched:
    """A kernel in Triton that is launched and computes nothing: its tensors must all be on the
    GPU."""

    def __init__(self) -> None:
        self.num_launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid), grid
        return self._launch

    def _launch(self, *args: Any, **_options: Any) -> None:
        self.num_launches += 1
        devices = {one.device.type for one in args if isinstance(one, Tensor)}
        assert devices == {"cuda"}, f"a kernel is given tensors on {devices}"


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Launched]]:
    """A context in which tensors are fake: yields the kernels in Triton by name.

    Weight files are still read: they come as CPU tensors on every device.
    """
    bound: Any = tf.PreTrainedModel.from_pretrained
    load: Callable[..., Any] = bound.__func__
    fake = Fake(allow_non_fake_inputs=True)

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            model, report = load(cls, *args, **kwargs)
        for module in model.modules():
            module.to = partial(_moved, module, fake)
        return model, report

    def build_skeleton(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return shard.build_skeleton(*args, **kwargs)

    monkeypatch.setattr(tf.PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
    monkeypatch.setattr(loading, "build_skeleton", build_skeleton)
    # only values tell whether logits agree
    monkeypatch.setattr(executor, "check_split", lambda *_: None)
    monkeypatch.setattr(loading, "give_back", lambda _: None)  # fake tensors have no pages
    modules = {
        attention_kernels: ("attend", "write"),
        model_kernels: ("multiply", "rms_norm", "silu_mul", "rotate"),
        sampling_kernels: ("draw",),
    }
    kernels = {name: Launched() for names in modules.values() for name in names}
    for module, names in modules.items():
        for name in names:
            monkeypatch.setattr(module, name, kernels[name])
    least = triton_products.LEAST_SHARED_BYTES
    monkeypatch.setattr(triton_products, "shared_bytes", lambda _: least)
    torch.ops.load_library(build("cuda_guard"))
    with fake, Answers(), Memory():
        yield kernels


def _moved(moved: Any, fake: FakeTensorMode, device: torch.device) -> Any:
    """What a module's `to` does. torch's own cannot put fake tensors in the place of real ones."""
    for module in moved.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update(
                {
                    name: _faked(one, fake).to(device)
                    for name, one in tensors.items()
                    if one is not None
                }
            )
    return moved


def _faked(tensor: Tensor, fake: FakeTensorMode) -> Tensor:
    return tensor if isinstance(tensor, FakeTensor) else fake.from_tensor(tensor)
