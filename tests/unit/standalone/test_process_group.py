"""A group of real child processes: restarted when they die, stopped in order, never left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.standalone.plan import ServiceProcess
from services.standalone.process_group import MAX_DELAY_S, ProcessGroup, backoff_s
from services.standalone.processes import StartFailed, bound_log, wait_until_gone
from services.standalone.signals import SignalInbox

READY = "print('ready', flush=True); import signal; "


class Stage:
    """A process group with what it said and recorded, in a folder of its own."""

    def __init__(self, home: Path, inbox: SignalInbox) -> None:
        self.home = home
        self.inbox = inbox
        self.said: list[str] = []
        self.recorded: list[dict[str, int]] = []
        self.group = ProcessGroup(inbox, say=self.said.append, changed=self.recorded.append)

    def child(self, name: str, program: str) -> ServiceProcess:
        child = ServiceProcess(
            name, self.home, argv=[sys.executable, "-c", program], env=os.environ
        )
        self.group.start(child)
        return child

    def watch_until(self, condition: Callable[[], bool], max_deaths: int | None = None) -> None:
        while not condition():
            self.group.watch(max_deaths=max_deaths)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with SignalInbox() as inbox:
        yield Stage(tmp_path, inbox)


def test_a_killed_child_is_restarted_and_that_is_said(stage: Stage) -> None:
    child = stage.child("relay", READY + "signal.pause()")
    first = child.pid
    os.kill(first, signal.SIGKILL)
    stage.watch_until(lambda: len(stage.recorded) == 2)
    assert child.is_running()
    assert child.pid != first
    assert stage.recorded[-1] == {"relay": child.pid}
    assert "killed by SIGKILL" in stage.said[0]
    assert "restarted" in stage.said[1]
    stage.group.stop([[child]], grace_s=30)


def test_a_child_that_keeps_ending_fails_the_start_with_its_log(stage: Stage) -> None:
    stage.child("gateway", "print('no such model'); raise SystemExit(3)")
    with pytest.raises(StartFailed, match="no such model"):
        stage.watch_until(lambda: False, max_deaths=1)
    assert "exit status 3" in stage.said[0]


def test_a_child_that_refuses_its_settings_is_not_restarted(stage: Stage) -> None:
    stage.child("stage-0", "print('cpu:0 is held'); raise SystemExit(2)")
    with pytest.raises(StartFailed, match="cpu:0 is held"):
        stage.watch_until(lambda: False, max_deaths=3)
    assert len(stage.recorded) == 1


def test_a_child_is_restarted_as_soon_as_its_log_can_be_opened(stage: Stage) -> None:
    child = stage.child("relay", READY + "signal.pause()")
    shutil.rmtree(stage.home / "logs")
    (stage.home / "logs").touch()
    child.kill()
    stage.watch_until(lambda: len(stage.said) == 2)
    assert "logs" in stage.said[1]
    (stage.home / "logs").unlink()
    stage.watch_until(child.is_running)
    child.kill()


def test_delays_between_restarts_stay_bounded() -> None:
    delays = [backoff_s(num_deaths) for num_deaths in range(1, 200)]
    assert delays == sorted(delays)
    assert delays[0] < 1
    assert delays[-1] == MAX_DELAY_S


def test_each_group_ends_before_the_next_is_stopped(stage: Stage, tmp_path: Path) -> None:
    order = tmp_path / "order"
    program = (
        "import signal, sys\n"
        "def end(number, frame):\n"
        f"    open({str(order)!r}, 'a').write(sys.argv[1] + ' ')\n"
        "    raise SystemExit\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "open(sys.argv[2], 'w').close()\n"
        "while True: signal.pause()\n"
    )
    children = []
    for name in ("gateway", "head", "tail"):
        flag = tmp_path / f"{name}.up"
        child = ServiceProcess(
            name, tmp_path, argv=[sys.executable, "-c", program, name, str(flag)], env=os.environ
        )
        stage.group.start(child)
        stage.watch_until(flag.exists)
        children.append(child)
    stage.group.stop([[child] for child in children], grace_s=30)
    assert order.read_text().split() == ["gateway", "head", "tail"]


def test_a_child_that_ignores_the_stop_is_killed_with_its_children(
    stage: Stage, tmp_path: Path
) -> None:
    flag = tmp_path / "grandchild"
    program = (
        "import os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        f"open({str(flag)!r} + '.new', 'w').write(str(grandchild.pid))\n"
        f"os.rename({str(flag)!r} + '.new', {str(flag)!r})\n"
        "signal.pause()\n"
    )
    child = stage.child("stage-0", program)
    stage.watch_until(flag.exists)
    grandchild = psutil.Process(int(flag.read_text()))
    stage.group.stop([[child]], grace_s=0)
    assert not child.is_running()
    assert wait_until_gone(grandchild, timeout_s=30)


def test_a_second_stop_waits_for_nothing(stage: Stage, tmp_path: Path) -> None:
    flag = tmp_path / "asked"
    program = (
        "import signal\n"
        f"signal.signal(signal.SIGTERM, lambda number, frame: open({str(flag)!r}, 'w').close())\n"
        f"open({str(flag)!r} + '.up', 'w').close()\n"
        "while True: signal.pause()\n"
    )
    child = stage.child("stage-0", program)
    stage.watch_until((tmp_path / "asked.up").exists)
    program = (
        "import os, pathlib\n"
        f"while not pathlib.Path({str(flag)!r}).exists(): os.sched_yield()\n"
        "os.kill(os.getppid(), 15)\n"
    )
    impatient = ServiceProcess(
        "impatient", tmp_path, argv=[sys.executable, "-c", program], env=os.environ
    )
    impatient.start()
    stage.group.stop([[child]], grace_s=3600)
    assert not child.is_running()
    assert stage.inbox.num_stops == 1
    impatient.kill()


def test_a_log_over_its_limit_keeps_one_older_copy(tmp_path: Path) -> None:
    log = tmp_path / "relay.log"
    log.write_text("x" * 11)
    bound_log(log, max_bytes=10)
    assert log.stat().st_size == 0
    assert (tmp_path / "relay.log.1").read_text() == "x" * 11


def test_a_log_is_bounded_without_room_for_its_older_copy(tmp_path: Path) -> None:
    log = tmp_path / "relay.log"
    log.write_text("x" * 11)
    (tmp_path / "relay.log.1").symlink_to("/dev/full")
    bound_log(log, max_bytes=10)
    assert log.stat().st_size == 0


def test_the_supervisor_lives_on_when_its_output_has_no_room() -> None:
    program = (
        "import sys; from services.standalone.__main__ import _say\n"
        "for number in range(10_000): _say(f'relay ended {number}')\n"
        "sys.stderr.write('alive')"
    )
    with Path("/dev/full").open("w") as full:
        said = subprocess.run(
            [sys.executable, "-c", program],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert said.stderr.startswith("alive")
