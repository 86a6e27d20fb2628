"""The best free device, device types outside torch, and names that are no device."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from services.stage.device.accelerator import Accelerator, load_module
from services.stage.device.acquire import acquire
from services.stage.device.cpu import Cpu, usable_cores
from services.stage.device.locks import DeviceLocks, holder
from shardline.base.errors import Invalid
from shardline_server.host.cores import show_cores
from shardline_server.host.threads import run_in_fresh_thread
from tests.pinned import unpinned_afterwards


@pytest.fixture(autouse=True)
def _unpinned_afterwards() -> Iterator[None]:
    with unpinned_afterwards():
        yield


@pytest.fixture
def _nothing_but_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.stage.device.acquire.accelerators", list)


@pytest.mark.usefixtures("_nothing_but_cores")
def test_without_an_accelerator_auto_takes_the_cores_that_nobody_holds(tmp_path: Path) -> None:
    first, *rest = usable_cores()
    held = DeviceLocks(tmp_path, [f"core-{first}"], worker="other")

    device = acquire("auto", worker="auto", lock_folder=tmp_path)

    assert isinstance(device, Cpu)
    assert device.name == f"cpu:{show_cores(tuple(rest))}"
    with pytest.raises(Invalid, match=r"0 of \d+ cores of this machine are free"):
        acquire("auto", worker="late", lock_folder=tmp_path)
    device.release()
    held.release()


def test_a_thread_that_computes_and_its_helpers_have_the_nice_value(tmp_path: Path) -> None:
    device = acquire("cpu", worker="cores", lock_folder=tmp_path, nice=7)

    def compute() -> list[int]:
        device.enter_thread()
        device.stand_back()
        torch.exp(torch.ones(1000, 4000))
        return [os.getpriority(os.PRIO_PROCESS, thread.id) for thread in psutil.Process().threads()]

    assert run_in_fresh_thread(compute).count(7) == device.num_threads
    assert os.getpriority(os.PRIO_PROCESS, 0) == 0
    device.release()


def test_a_kind_alone_takes_a_free_one_of_it(tmp_path: Path) -> None:
    load_module("tests.accelerator")
    first = acquire("cpu", worker="cores", lock_folder=tmp_path, num_cores=1)
    assert first.name == f"cpu:{usable_cores()[0]}"
    taken = [acquire("toy", worker=str(place), lock_folder=tmp_path) for place in range(2)]
    assert {device.name for device in taken} == {"toy:0", "toy:1"}
    with pytest.raises(Invalid, match="none of 2 toy devices here is free"):
        acquire("toy", worker="late", lock_folder=tmp_path)
    for device in (first, *taken):
        device.release()


def test_more_cores_than_are_free_are_refused_unless_they_are_shared(tmp_path: Path) -> None:
    num = len(usable_cores())
    held = acquire("cpu", worker="first", lock_folder=tmp_path, shared=True, num_cores=1)
    with pytest.raises(
        Invalid, match=f"{num - 1} of {num} cores of this machine are free, {num} are asked for"
    ):
        acquire("cpu", worker="second", lock_folder=tmp_path, num_cores=num)
    shared = acquire("cpu", worker="second", lock_folder=tmp_path, shared=True, num_cores=num)
    assert shared.name == f"cpu:{show_cores(usable_cores())}"
    for device in (held, shared):
        device.release()


@pytest.mark.usefixtures("_nothing_but_cores")
def test_auto_shares_cores_with_those_that_share_them(tmp_path: Path) -> None:
    cores = [f"core-{core}" for core in usable_cores()]
    held = DeviceLocks(tmp_path, cores, worker="other", shared=True)

    device = acquire("auto", worker="auto", lock_folder=tmp_path, shared=True)

    assert device.name == f"cpu:{show_cores(usable_cores())}"
    with pytest.raises(Invalid, match=r"0 of \d+ cores of this machine are free"):
        acquire("auto", worker="alone", lock_folder=tmp_path)
    device.release()
    held.release()


def test_who_looks_refuses_a_device_to_nobody(tmp_path: Path) -> None:
    """Each of many looks takes the free lock for a moment; a worker that starts meanwhile waits for
    that moment."""
    DeviceLocks(tmp_path, ["core-0"], worker="first").release()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            holder(tmp_path, "core-0")

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(300):
            DeviceLocks(tmp_path, ["core-0"], worker="starting").release()
    finally:
        ended.set()
        looking.join()


def test_auto_takes_accelerators_first_then_cores(tmp_path: Path) -> None:
    load_module("tests.accelerator")

    taken = [acquire("auto", worker=str(place), lock_folder=tmp_path) for place in range(3)]

    assert [type(device) for device in taken] == [Accelerator, Accelerator, Cpu]
    assert {device.name for device in taken[:2]} == {"toy:0", "toy:1"}
    with pytest.raises(Invalid, match=r"toy-0 is held by [01] \(pid"):
        acquire("toy:0", worker="late", lock_folder=tmp_path)
    for device in taken:
        device.release()


def test_an_accelerator_refuses_int8_by_name(tmp_path: Path) -> None:
    load_module("tests.accelerator")
    device = acquire("toy:1", worker="one", lock_folder=tmp_path)

    with pytest.raises(Invalid, match=r"'int8' is not served on toy:1.*cpu:0-3"):
        device.dtype("int8")
    assert 0 < device.available_bytes() <= device.total_bytes()
    assert device.identity()[:2] == ["toy", "test accelerator 1"]
    device.release()


@pytest.mark.parametrize("name", ["gpu:0", "gpu", "meta:0", "meta", "npu-0", "0-3", ""])
def test_what_is_no_device_names_the_forms(name: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"is not a device.*cuda:0"):
        acquire(name, worker="one", lock_folder=tmp_path)


def test_a_device_module_that_is_not_there_is_named() -> None:
    with pytest.raises(
        Invalid, match="SHARDLINE_DEVICE_MODULE: no_such_backend cannot be imported"
    ):
        load_module("no_such_backend")


@pytest.mark.parametrize("kind", ["cpu", "toy", "auto"])
def test_a_lock_folder_of_another_user_is_refused_by_its_name(tmp_path: Path, kind: str) -> None:
    load_module("tests.accelerator")
    os.chown(tmp_path, 54321, 54321)

    with pytest.raises(Invalid, match=r"SHARDLINE_LOCK_DIR: .* belongs to the user with the id"):
        acquire(kind, worker="late", lock_folder=tmp_path)
