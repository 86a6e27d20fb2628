"""Stages in processes of their own: killed, paused and back again, as a head sees it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from services.stage.hop.sockets import CurveKeys, Sockets
from shardline.base.config import Times
from shardline.contract.wire import StageCard, decode_card
from tests.links import NUM_LAYERS, PATIENCE_S, Pipes, open_pipes, pass_a_step
from tests.repository import REPOSITORY

QUICK = Times(heartbeat_s=0.1, link_dead_s=1.0, unbind_s=0.5, stall_s=60.0)


class Process:
    """A running stage that may be killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.stage.pipeline.lone_stage", QUICK.model_dump_json()],
            cwd=REPOSITORY,
            env={"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'shared'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.card: StageCard = decode_card(self._process.stdout.readline())

    def signal(self, number: signal.Signals) -> None:
        """For example SIGKILL or SIGSTOP."""
        self._process.send_signal(number)

    def close(self) -> None:
        """Leaves no process behind."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def stage() -> Iterator[Process]:
    stage = Process()
    yield stage
    stage.close()


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    with open_pipes(Sockets(bind="tcp://127.0.0.1")) as pipes:
        yield pipes


def test_a_killed_stage_is_noticed_by_its_closed_connection_and_replaced(
    pipes: Pipes, stage: Process
) -> None:
    head = pipes.head(8, QUICK, cards=lambda: [stage.card, *pipes.cards()])
    before = head.ready()
    spare = pipes.stage(8, NUM_LAYERS, QUICK)

    stage.signal(signal.SIGKILL)

    assert "connection was closed" in head.losses.get(timeout=PATIENCE_S)
    after = head.ready()
    assert after.epoch > before.epoch
    pass_a_step(after.pipeline, [after, spare.wirings.get(timeout=PATIENCE_S)], 0)


def test_a_paused_stage_is_lost_by_its_silence_and_serves_again_when_it_wakes(
    pipes: Pipes, stage: Process
) -> None:
    head = pipes.head(8, QUICK, cards=lambda: [stage.card])
    before = head.ready()

    stage.signal(signal.SIGSTOP)
    reason = head.losses.get(timeout=PATIENCE_S)
    stage.signal(signal.SIGCONT)

    assert "silent for" in reason
    assert head.ready().epoch > before.epoch


@pytest.mark.parametrize("transport", ["ipc", "curve"])
def test_pipelines_form_over_every_transport(tmp_path: Path, transport: str) -> None:
    public, secret = zmq.curve_keypair()
    sockets = {
        "ipc": lambda: Sockets(bind=f"ipc://{tmp_path}"),
        "curve": lambda: Sockets(
            bind="tcp://127.0.0.1", curve=CurveKeys(public=public, secret=secret, server=public)
        ),
    }[transport]()
    with open_pipes(sockets) as pipes:
        tail = pipes.stage(8, NUM_LAYERS)
        wirings = [pipes.head(8).ready(), tail.wirings.get(timeout=PATIENCE_S)]
        pass_a_step(wirings[0].pipeline, wirings, 0)
