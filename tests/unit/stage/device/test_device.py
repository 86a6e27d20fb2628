"""Devices: names, locks between processes, pinning, dtypes."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.stage.device import cpu
from services.stage.device.acquire import acquire
from services.stage.device.cpu import Cpu
from services.stage.device.device import Device
from services.stage.device.locks import DeviceLocks
from shardline.base.errors import Invalid
from shardline_server.host import cgroup
from shardline_server.host.threads import SPIN_COUNT
from tests.pinned import cores_of_threads, unpinned_afterwards

CORE = min(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _unpinned_afterwards() -> Iterator[None]:
    with unpinned_afterwards():
        yield


def take(folder: Path, *, worker: str = "first", shared: bool = False) -> Device:
    """One core, the same for all tests."""
    return acquire(f"cpu:{CORE}", worker=worker, lock_folder=folder, shared=shared)


def test_every_thread_is_pinned_to_the_taken_core(tmp_path: Path) -> None:
    device = take(tmp_path)

    assert device.is_cpu
    assert isinstance(device, Cpu)
    assert device.cores == (CORE,)
    assert device.num_threads == torch.get_num_threads() == 1
    assert cores_of_threads() == {(CORE,)}
    assert device.available_bytes() > 0
    device.release()


@pytest.mark.parametrize(("shared", "turns"), [("true", "0"), ("0", str(SPIN_COUNT))])
def test_threads_that_wait_leave_their_cores_to_those_who_share_them(
    shared: str, turns: str
) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))
    }
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "SHARDLINE_DEVICE_SHARED": shared}
    argv = [sys.executable, "-m", "services.stage", "devices"]

    run = subprocess.run(
        argv,
        env={**environment, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )

    # As libgomp, which torch computes with, has read it
    assert f"GOMP_SPINCOUNT = '{turns}'" in run.stderr, run.stderr


def test_a_held_core_names_its_holder(tmp_path: Path) -> None:
    device = take(tmp_path)

    with pytest.raises(Invalid, match=rf"core-{CORE} is held by first \(pid {os.getpid()} on "):
        take(tmp_path, worker="second")

    device.release()
    take(tmp_path, worker="second").release()


def test_an_exclusive_worker_is_refused_a_shared_core(tmp_path: Path) -> None:
    first = take(tmp_path, shared=True)
    second = take(tmp_path, worker="second", shared=True)

    with pytest.raises(Invalid, match="is held by second"):
        take(tmp_path, worker="third")

    first.release()
    second.release()
    take(tmp_path, worker="third").release()


def test_libraries_take_as_many_threads_as_cores_in_every_thread_that_computes(
    tmp_path: Path,
) -> None:
    device = take(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(device.enter_thread).result()
        assert pool.submit(openmp_threads).result() == 1
    device.release()


def openmp_threads() -> int:
    """The calling thread's, by the library that torch has loaded."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    path = next(line.split()[-1] for line in maps if "libgomp" in line)
    return int(ctypes.CDLL(path).omp_get_max_threads())


def test_the_kernel_frees_the_core_of_a_killed_holder(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from services.stage.device.acquire import acquire;"
        f"device = acquire('cpu:{CORE}', worker='victim', lock_folder=Path(sys.argv[1]));"
        "print('held', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "held\n"
        with pytest.raises(Invalid, match=rf"held by victim \(pid {victim.pid} "):
            take(tmp_path)

        victim.kill()
        victim.wait()

        take(tmp_path).release()


def test_taking_a_core_that_is_not_here_leaves_nothing_locked(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="no core 4000 here"):
        acquire(f"cpu:{CORE},4000", worker="first", lock_folder=tmp_path)

    take(tmp_path).release()


def test_neither_of_two_locks_stays_when_one_is_held(tmp_path: Path) -> None:
    held = DeviceLocks(tmp_path, ["core-1"], worker="first")

    with pytest.raises(Invalid, match="core-1 is held by first"):
        DeviceLocks(tmp_path, ["core-1", "core-0"], worker="second")

    DeviceLocks(tmp_path, ["core-0"], worker="third").release()
    held.release()


def test_an_unknown_gpu_is_named(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="no accelerator cuda:99 here"):
        acquire("cuda:99", worker="first", lock_folder=tmp_path)


def test_a_core_is_held_though_its_holders_name_cannot_be_written(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        locks = DeviceLocks(tmp_path, ["core-0"], worker="one")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "core-0.lock").read_text() == ""
    with pytest.raises(Invalid, match="core-0 is held"):
        DeviceLocks(tmp_path, ["core-0"], worker="two")
    locks.release()


def test_a_lock_folder_that_is_a_file_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(Invalid, match="SHARDLINE_LOCK_DIR"):
        take(tmp_path / "file")


def test_float16_on_a_cpu_names_the_served_dtypes(tmp_path: Path) -> None:
    device = take(tmp_path)

    assert device.dtype("bfloat16") is torch.bfloat16
    with pytest.raises(Invalid, match="Use float32 or bfloat16"):
        device.dtype("float16")
    device.release()


def test_cores_and_memory_are_those_of_the_containers_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "cpuset", lambda: (1, 3))
    monkeypatch.setattr(cgroup, "memory_limit", lambda: 3 << 20)
    monkeypatch.setattr(cgroup, "memory_left", lambda: 1 << 20)
    assert cpu.usable_cores() == (1, 3)
    assert cpu.memory_bytes() == 3 << 20
    device = Cpu("cpu:1", worker="w", folder=tmp_path / "locks")
    assert device.available_bytes() == 1 << 20
    device.release()


def test_cores_beyond_the_cpu_quota_are_left_alone_or_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: 1.0)
    device = acquire("cpu", worker="kind", lock_folder=tmp_path)
    assert (device.num_threads, "CPU quota" in capfd.readouterr().out) == (1, False)
    device.release()
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: 0.5)
    named = acquire(f"cpu:{CORE}", worker="named", lock_folder=tmp_path)
    assert "the CPU quota is less than this stage's cores" in capfd.readouterr().out
    named.release()
