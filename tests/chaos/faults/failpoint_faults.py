"""SIGKILL at every named failpoint: a process dies between two lines that a random kill hardly ever
hits. Knows the points and who passes them; the load that makes somebody pass is the harness's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from shardline_server.failpoints import Point
from tests.chaos.faults.arming import arm
from tests.chaos.load.workload import Workload

TAIL = "tail"
"""Stands for the place of the last stage, which only the stack knows."""


class Hurtable(Protocol):
    """What these faults need of a stack under test."""

    failpoints: Path
    workload: Workload

    @property
    def num_stages(self) -> int:
        """Of a pipeline."""

    def pick(self, rng: random.Random, prefix: str) -> tuple[str, int]:
        """Name and pid of a living process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAt:
    """The next process that passes the point with these facts is gone."""

    point: Point
    who: str
    when: Mapping[str, str | int]
    forms: bool = False
    """It is passed while a pipeline forms, so the tail is killed first to make one form anew."""

    @property
    def kind(self) -> str:
        """Its name in chaos.json."""
        return f"kill {self.who} at {self.point}"

    @property
    def is_kill(self) -> bool:
        """A process dies of it."""
        return True

    def missing(self, target: Hurtable) -> str | None:
        """A single stage binds nobody and has no tail of its own; encoders say no tokens."""
        if self.point in (Point.MID_DECODE, Point.AFTER_EMIT) and not target.workload.generates:
            return "encoders say no tokens"
        if target.num_stages == 1 and (self.forms or self.who == TAIL):
            return "a pipeline of one stage has no stage behind the head"
        return None

    def strike(self, target: Hurtable, rng: random.Random) -> None:
        """Returns once a process claimed it; raises NeverStruck, disarmed."""
        places = {"head": 0, TAIL: target.num_stages - 1}
        when = (
            {"place": places[self.who]}
            if self.point in (Point.MID_PREFILL, Point.MID_DECODE)
            else self.when
        )
        arming = arm(target.failpoints, self.point, "kill", when=when)
        if self.forms:
            _, pid = target.pick(rng, f"stage-{target.num_stages - 1}")
            psutil.Process(pid).kill()
        arming.wait()


def _at(who: str, point: Point, *, forms: bool = False, **when: str) -> KillAt:
    return KillAt(point=point, who=who, when=when, forms=forms)


FAULTS: tuple[KillAt, ...] = (
    _at("head", Point.MID_PREFILL),
    _at(TAIL, Point.MID_PREFILL),
    _at("relay", Point.STAMPED),
    _at("head", Point.MID_DECODE),
    _at(TAIL, Point.MID_DECODE),
    _at("gateway", Point.GATEWAY_INSERTED),
    _at("head", Point.AFTER_EMIT),
    _at(TAIL, Point.HELLO_TAKEN, forms=True),
    _at("head", Point.HEARTBEAT_BEFORE_COMMIT),
    _at("relay", Point.INTAKE_TAKEN),
    _at("relay", Point.CELERY_TAKEN),
    _at("relay by stream", Point.INTAKE_INSERTED, door="stream"),
    _at("head", Point.HEARTBEAT_AFTER_COMMIT),
    _at("relay by celery", Point.INTAKE_INSERTED, door="celery"),
    _at("head", Point.END_BEFORE_COMMIT),
    _at("relay", Point.TASK_ENDED),
    _at("head", Point.END_AFTER_COMMIT),
    _at("head", Point.BEFORE_CLAIM),
    _at("head", Point.AFTER_CLAIM),
    _at("head", Point.HELLO_SENT, forms=True),
)
