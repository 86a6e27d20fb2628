"""A full disk is full under one folder alone, for those who preload it, until it is freed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.shims.disk import Disk

WRITE = """
import os, shutil, sys
path, way = sys.argv[1], sys.argv[2]
file = os.open(path, os.O_RDWR | os.O_CREAT)
try:
    {
        "write": lambda: os.write(file, b"x"),
        "pwrite": lambda: os.pwrite(file, b"x", 0),
        "writev": lambda: os.writev(file, [b"x"]),
        "pwritev": lambda: os.pwritev(file, [b"x"], 0),
        "allocate": lambda: os.posix_fallocate(file, 0, 4096),
        "copy": lambda: shutil.copyfile(sys.executable, path),
    }[way]()
except OSError as error:
    print(error.strerror)
"""
WAYS = ("write", "pwrite", "writev", "pwritev", "allocate", "copy")


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    disk = Disk(tmp_path / "disk")
    assert disk.why_not is None
    return disk


def write(disk: Disk, path: Path, way: str) -> str:
    """What a process says that writes one file in one way."""
    path.parent.mkdir(exist_ok=True)
    environment = {**os.environ, **disk.environment, "LD_PRELOAD": str(disk.library)}
    command = [sys.executable, "-c", WRITE, str(path), way]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("way", WAYS)
def test_only_the_full_folder_has_no_room_until_it_is_freed(
    way: str, disk: Disk, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    neighbor = tmp_path / "fuller"
    disk.fill(full)
    assert write(disk, full / "file", way) == "No space left on device"
    assert disk.num_refused == 1
    assert write(disk, neighbor / "file", way) == ""

    disk.free()
    assert write(disk, full / "file", way) == ""
    assert disk.num_refused == 1
