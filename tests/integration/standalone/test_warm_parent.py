"""Forks of a real warm parent: their ends, their logs, their environment; and when there is
none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.standalone.adopted import AdoptedProcess
from services.standalone.plan import make_warm_parent
from services.standalone.settings import StandaloneSettings
from services.standalone.warm_parent import WarmParent
from tests.polling import until

REFUSED = {"SHARDLINE_DTYPE": "int3"}
"""A stage that ends at once, because of a setting that can never work."""


@pytest.fixture(scope="module")
def parent() -> Iterator[WarmParent]:
    folder = Path(tempfile.mkdtemp(prefix="shardline-warm-"))
    parent = make_warm_parent(StandaloneSettings(), folder, "")
    yield parent
    if parent.process is not None:
        parent.kill()
    shutil.rmtree(folder)


@pytest.fixture
def warm(parent: WarmParent) -> WarmParent:
    if not parent.is_running():
        parent.start()
    until(parent.is_settled)
    assert parent.problem == ""
    return parent


def fork(parent: WarmParent, log: Path, **own: str) -> AdoptedProcess | None:
    return parent.fork("stage-7", {**parent.environment, **REFUSED, **own}, log)


def test_the_exit_status_of_a_fork_and_its_output_reach_the_supervisor(
    warm: WarmParent, tmp_path: Path
) -> None:
    stage = fork(warm, tmp_path / "log")
    assert stage is not None
    assert stage.wait(60) == 2
    assert "SHARDLINE_DTYPE" in (tmp_path / "log").read_text()


def test_a_fork_is_a_child_of_this_process_and_its_killer_is_known(
    warm: WarmParent, tmp_path: Path
) -> None:
    stage = fork(
        warm,
        tmp_path / "log",
        SHARDLINE_DTYPE="float32",
        SHARDLINE_REDIS_URL="redis://127.0.0.1:1/0",
    )
    assert stage is not None
    assert psutil.Process(stage.pid).ppid() == os.getpid()
    with pytest.raises(subprocess.TimeoutExpired):
        stage.wait(0.0)
    stage.send_signal(signal.SIGKILL)
    assert stage.wait(60) == -signal.SIGKILL


def test_a_stage_whose_libraries_would_read_another_environment_is_not_forked(
    warm: WarmParent, tmp_path: Path
) -> None:
    assert fork(warm, tmp_path / "log", OMP_NUM_THREADS="3") is None
    assert fork(warm, tmp_path / "log") is not None


def test_an_environment_too_large_for_one_message_is_not_forked(
    warm: WarmParent, tmp_path: Path
) -> None:
    assert fork(warm, tmp_path / "log", SHARDLINE_LAYERS="0" * 2**21) is None
    assert fork(warm, tmp_path / "log") is not None


def test_bytes_in_a_variable_that_are_no_text_reach_the_fork(
    warm: WarmParent, tmp_path: Path
) -> None:
    stage = fork(warm, tmp_path / "log", SHARDLINE_DTYPE=os.fsdecode(b"int\xff"))
    assert stage is not None
    assert stage.wait(60) == 2
    assert "unable to parse raw data as a unicode string" in (tmp_path / "log").read_text()


def test_a_killed_parent_forks_nothing_until_it_has_started_again(
    warm: WarmParent, tmp_path: Path
) -> None:
    warm.kill()
    assert fork(warm, tmp_path / "log") is None
    warm.start()
    assert fork(warm, tmp_path / "log") is None
    until(warm.is_settled)
    assert fork(warm, tmp_path / "log") is not None


def test_a_parent_whose_libraries_start_threads_says_so_and_forks_nothing(tmp_path: Path) -> None:
    settled = make_warm_parent(StandaloneSettings(), tmp_path, "")
    parent = WarmParent(tmp_path, {**settled.environment, "OPENBLAS_NUM_THREADS": "2"})
    parent.start()
    until(parent.is_settled)
    assert "1 threads" in parent.problem
    assert fork(parent, tmp_path / "log") is None
    parent.kill()
