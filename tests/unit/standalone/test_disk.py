"""A disk that runs full is said once, and once when there is room again."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.standalone.disk import LOW_BYTES, DiskWatch


def test_each_change_of_a_disk_that_fills_and_empties_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    watch = DiskWatch(tmp_path, said.append)
    for free_bytes in (LOW_BYTES, LOW_BYTES - 1, 5 << 20, LOW_BYTES, LOW_BYTES + 1):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda _folder, free=free_bytes: SimpleNamespace(free=free)
        )
        watch.look()

    assert said == [
        f"only 1023 MiB are free in {tmp_path}: make room before Postgres has none",
        f"1024 MiB are free in {tmp_path} again",
    ]


def test_the_disk_of_the_folder_itself_is_asked(tmp_path: Path) -> None:
    said: list[str] = []
    DiskWatch(tmp_path, said.append).look()
    assert bool(said) == (shutil.disk_usage(tmp_path).free < LOW_BYTES)
