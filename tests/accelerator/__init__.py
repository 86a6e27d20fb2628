"""The test accelerator as a torch device type, `toy`: importing this package builds, loads and
registers it.

Name it in SHARDLINE_DEVICE_MODULE and `toy:0` in SHARDLINE_DEVICE. What torch asks a device's
module for is in `tests.accelerator.toy`; the backend itself is `tests/extensions/toy.cpp`.
"""

from __future__ import annotations

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from tests.accelerator import toy
from tests.extensions.build import build

toy.load(build("toy"))
rename_privateuse1_backend(toy.NAME)
torch._register_device_module(toy.NAME, toy)
