"""The CPU kernels that products and fused parts are tried with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from services.stage.kernels.kernel import Kernel
from tests.unit.stage.attention.attending import kernels


@pytest.fixture
def inference() -> Iterator[None]:
    """As the engine runs."""
    with torch.inference_mode():
        yield


@pytest.fixture(params=kernels(), ids=lambda kernel: kernel.isa)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """Each variant that this processor runs."""
    found: Kernel = request.param
    return found
