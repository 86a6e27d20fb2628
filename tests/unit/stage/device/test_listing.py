"""The list of devices: what SHARDLINE_DEVICE may name here, and who holds it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from services.stage.device import listing
from services.stage.device.cpu import usable_cores
from services.stage.device.locks import DeviceLocks


def test_every_usable_core_is_listed_with_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDLINE_LOCK_DIR", str(tmp_path))
    core = usable_cores()[0]
    locks = DeviceLocks(tmp_path, [f"core-{core}"], worker="somebody")

    assert listing.main(["--json"]) == 0

    cores = [one for one in json.loads(capsys.readouterr().out) if one["kind"] == "cpu"]
    assert sum(one["cores"] for one in cores) == len(usable_cores())
    assert all(one["memory_bytes"] > 0 and one["instruction_sets"] for one in cores)
    held = [one["held_by"] for one in cores if one["held_by"]]
    assert [list(one) for one in held] == [[f"core-{core}"]]
    assert held[0][f"core-{core}"].startswith(f"somebody (pid {os.getpid()} on ")
    locks.release()


def test_a_line_names_device_memory_and_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDLINE_LOCK_DIR", str(tmp_path))

    assert listing.main([]) == 0

    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("cpu:")
    assert " GiB" in line
    assert "held by" not in line


def test_a_device_type_outside_torch_is_listed_once_its_module_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDLINE_LOCK_DIR", str(tmp_path))
    monkeypatch.setenv("SHARDLINE_DEVICE_MODULE", "tests.accelerator")

    assert listing.main(["--json"]) == 0

    kinds = {one["name"]: one["kind"] for one in json.loads(capsys.readouterr().out)}
    assert (kinds["toy:0"], kinds["toy:1"]) == ("test accelerator 0", "test accelerator 1")
