"""The runtime folder: one owner, a true record of processes, up.json that only its owner reads."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.standalone.cores import CoreClaims
from services.standalone.down import stop_stack
from services.standalone.state_dir import (
    AlreadyUp,
    RecordedProcess,
    StackRecord,
    StateDir,
    write_private,
)
from shardline.base.errors import Invalid

DAMAGED = [b"", b'{"relay": {"pid"', b"[]", b'{"\xff": 1}']


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until it is told to end."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_second_stack_in_one_folder_is_refused(tmp_path: Path) -> None:
    with (
        StateDir(tmp_path).lock(),
        pytest.raises(AlreadyUp, match="make down"),
        StateDir(tmp_path).lock(),
    ):
        pass
    with StateDir(tmp_path).lock():
        pass


def test_down_ends_a_recorded_process_without_its_supervisor(
    tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    home = StateDir(tmp_path)
    home.record({"relay": stranger.pid})
    home.publish({"model": "clerk"})
    assert stop_stack(home, drain_s=1) == ["relay"]
    assert stranger.wait(30) == -15
    assert home.published() is None
    assert stop_stack(home, drain_s=1) == []


def test_down_leaves_a_process_alone_that_has_got_a_recorded_pid(
    tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    home = StateDir(tmp_path)
    home.record({"relay": stranger.pid})
    entry = home.recorded()["relay"]
    earlier = RecordedProcess(pid=entry.pid, started_at=entry.started_at - 100)
    assert entry.find() is not None
    assert earlier.find() is None


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_record_is_named_and_kept_until_it_is_written_anew(
    tmp_path: Path, content: bytes
) -> None:
    home = StateDir(tmp_path)
    record = tmp_path / "pids.json"
    record.write_bytes(content)
    with pytest.raises(Invalid, match=r"pids.json: .*pgrep.*delete it"):
        stop_stack(home, drain_s=1)
    assert record.read_bytes() == content
    home.record({"one": os.getpid()})
    assert set(home.alive()) == {"one"}


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_up_json_is_named_and_ends_with_the_stack(tmp_path: Path, content: bytes) -> None:
    home = StateDir(tmp_path)
    home.up_file.write_bytes(content)
    with pytest.raises(Invalid, match=r"up.json: it is damaged. Run `make down`"):
        home.published()
    assert stop_stack(home, drain_s=1) == []
    assert home.published() is None


def test_adding_a_process_to_the_record_keeps_the_others_start_times(
    tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    home = StateDir(tmp_path)
    home.record({"one": os.getpid()})
    before = home.recorded()["one"]
    home.record({"one": os.getpid(), "two": stranger.pid})
    assert home.recorded()["one"] == before
    assert set(home.alive()) == {"one", "two"}


def test_up_json_is_replaced_whole_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    home = StateDir(tmp_path)
    home.publish({"stages": 1})
    home.publish({"stages": 2})
    assert stat.S_IMODE(home.up_file.stat().st_mode) == 0o600
    assert home.published() == {"stages": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["up.json"]


def test_a_replaced_file_cannot_be_read_by_others(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(mode=0o644)
    write_private(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_replacing_a_file_without_room_keeps_the_old_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "up.json"
    write_private(path, b"old")
    program = (
        "import resource, sys; from pathlib import Path; "
        "from services.standalone.state_dir import write_private\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2, 2))\n"
        f"write_private(Path({str(path)!r}), b'new one')"
    )
    failed = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=False
    )
    assert "OSError" in failed.stderr
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_up_json_that_cannot_be_written_is_said_once_and_written_later(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    said = list[str]()
    register = StackRecord(StateDir(folder), said.append)
    with pytest.raises(FileNotFoundError):
        register.write({"relay": os.getpid()})
    folder.mkdir()
    register.write({"relay": 1})
    register.publish({"model": "clerk"})
    shutil.rmtree(folder)

    register.write({"relay": os.getpid()})
    register.catch_up()
    assert len(said) == 1
    folder.mkdir()
    register.catch_up()
    assert StateDir(folder).published() == {"model": "clerk", "processes": {"relay": os.getpid()}}
    assert set(StateDir(folder).recorded()) == {"relay"}


def test_a_stack_that_claims_all_cores_learns_which_are_taken(tmp_path: Path) -> None:
    with CoreClaims(tmp_path) as first, CoreClaims(tmp_path) as second:
        assert first.claim([0, 1, 2]) == frozenset()
        first.keep([1])
        assert second.claim([0, 1, 2]) == {1}
    with CoreClaims(tmp_path) as third:
        assert third.claim([0, 1, 2]) == frozenset()


def test_a_core_stays_taken_by_a_stack_that_shared_it_with_one_that_ended(tmp_path: Path) -> None:
    with CoreClaims(tmp_path) as second:
        with CoreClaims(tmp_path) as first:
            assert first.claim([0]) == frozenset()
            assert second.claim([0]) == {0}
        with CoreClaims(tmp_path) as third:
            assert third.claim([0]) == {0}
