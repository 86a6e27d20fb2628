"""One device per file of tests, one place for models and checksums per session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.stage.device.device import Device


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models are saved."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """Core 0, locked in a folder of its own. Given back at once: whole stacks of later tests need every core."""
    cores, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    taken = Device.take("cpu:0", worker="tests", lock_folder=tmp_path_factory.mktemp("locks"))
    yield taken
    taken.release()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(num_threads)
