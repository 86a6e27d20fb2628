"""One device per file of tests, one place for models and checksums per session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.stage.device.device import Device
from tests.pinned import first_core


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models are saved."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """A core, locked in a folder of its own. Given back at once: whole stacks of later tests need
    every core."""
    with first_core(tmp_path_factory.mktemp("locks")) as device:
        yield device
