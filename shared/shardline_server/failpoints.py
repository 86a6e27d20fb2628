"""Failpoints: named places at which a test makes a process die, hang or raise. For tests only, off
unless SHARDLINE_FAILPOINTS names a folder when the process starts. Owns the names and how a point
is armed and claimed; knows nothing of the code around it.

A file `<folder>/<name>` arms a point, see `ArmedPoint`. A process that passes that point with
matching facts claims the file by renaming it, so that over all processes it strikes as often as it
asks for; every strike leaves a file `<name>.<pid>-<number>.struck` behind. Write it under another
name first, then rename it: it is read at any moment.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

MAX_PAUSE_S = 600.0


class Point(StrEnum):
    """Every failpoint. The facts that `when` may ask for stand behind the place."""

    MID_PREFILL = "mid-prefill"
    """A stage has taken in a step that opens sequences and has not computed it: place, seed (of
    each)."""
    MID_DECODE = "mid-decode"
    """The same with a decode row: place."""
    NAN_LOGITS = "nan-logits"
    """The tail samples a row: seed. With the action `nan` its logits are not numbers."""
    AFTER_EMIT = "after-emit"
    """A head wrote deltas to Redis; the next heartbeat will save their tokens."""
    HEARTBEAT_BEFORE_COMMIT = "heartbeat-before-commit"
    HEARTBEAT_AFTER_COMMIT = "heartbeat-after-commit"
    """The leases are renewed: saves (tokens, or nothing)."""
    END_BEFORE_COMMIT = "end-before-commit"
    """State and result are written and not committed."""
    END_AFTER_COMMIT = "end-after-commit"
    """Committed; neither Celery nor a reader has heard of it."""
    BEFORE_CLAIM = "before-claim"
    """A head received messages and has not claimed their rows: between publish and claim."""
    AFTER_CLAIM = "after-claim"
    """The claim is committed, the engine knows nothing of it."""
    STAMPED = "stamped"
    """A relay committed `sent_at` and has sent nothing yet: between stamp and publish."""
    INTAKE_TAKEN = "intake-taken"
    """A relay took entries of the intake stream and has not stored them."""
    CELERY_TAKEN = "celery-taken"
    """A relay took a message out of the Celery door's queue, and Celery has not seen it."""
    INTAKE_INSERTED = "intake-inserted"
    """A relay committed rows and has not acknowledged where they came from: door (stream,
    celery)."""
    TASK_ENDED = "task-ended"
    """A relay sent what follows a Celery task, or stored its result, and has not noted that."""
    CHORD_JOINED = "chord-joined"
    """A relay has claimed a chord and read the values of its parts, and has not sent its body."""
    SCHEDULE_FIRED = "schedule-fired"
    """A relay wrote a schedule's job and its next time and has not committed them."""
    GATEWAY_INSERTED = "gateway-inserted"
    """A gateway committed a row and has not answered."""
    HELLO_SENT = "hello-sent"
    """A head has bound its stages and not wired them."""
    HELLO_TAKEN = "hello-taken"
    """A stage has bound itself to a head and not answered."""


class Struck(Exception):
    """The action `raise`."""


class ArmedPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds what the file of a point asks for. `times` None strikes for ever; `when` must match the
    facts: a fact that is a collection matches what it contains."""

    action: Literal["kill", "pause", "raise", "nan"]
    pause_s: Annotated[float, Meta(ge=0, le=MAX_PAUSE_S)] = 0.0
    when: dict[str, str | int] = {}
    times: Annotated[int, Meta(ge=1)] | None = 1

    def matches(self, facts: dict[str, Any]) -> bool:
        """Whether every fact that it asks for is so."""
        return all(
            name in facts and _holds(facts[name], wanted) for name, wanted in self.when.items()
        )


class Failpoints:
    """One folder of armed points."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._strikes = count(1)

    def take(self, name: str, facts: dict[str, Any]) -> str | None:
        """The action of a point that strikes here and now, carried out if it is `kill`, `pause` or
        `raise`."""
        path = self._folder / name
        try:
            armed = _read(path)
            if not armed.matches(facts) or not self._claim(path, armed):
                return None
        except FileNotFoundError:
            return None  # Not armed, or another process was first.
        _strike(name, armed)
        return armed.action

    def _claim(self, path: Path, armed: ArmedPoint) -> bool:
        """Exactly one process gets each of its `times`."""
        mark = path.with_name(f"{path.name}.{os.getpid()}-{next(self._strikes)}.struck")
        if armed.times is None:
            mark.write_bytes(path.read_bytes())
            return True
        path.rename(mark)
        num_left = (_read(mark).times or 1) - 1
        if num_left:
            rest = mark.with_suffix(".rest")
            rest.write_bytes(msgspec.json.encode(msgspec.structs.replace(armed, times=num_left)))
            rest.rename(path)
        return True


class FailpointSettings(BaseSettings):
    """Read once, when this module is imported."""

    model_config = SettingsConfigDict(
        env_prefix="SHARDLINE_", env_ignore_empty=True, extra="ignore"
    )

    failpoints: Path | None = Field(
        None,
        description="folder in which a test arms failpoints; never set it in production: "
        "who can write there can kill services",
    )


def _from_environment() -> Failpoints | None:
    folder = FailpointSettings().failpoints
    return None if folder is None else Failpoints(folder)


ARMED = _from_environment()
"""None in production."""


def failpoint(name: Point, **facts: object) -> None:
    """Nothing, unless a test armed this point."""
    if ARMED is not None:
        ARMED.take(name, facts)


def is_struck(name: Point, action: str, **facts: object) -> bool:
    """Whether a test armed this point with an action that is the caller's to carry out."""
    return ARMED is not None and ARMED.take(name, facts) == action


def _read(path: Path) -> ArmedPoint:
    return msgspec.json.decode(path.read_bytes(), type=ArmedPoint)


def _holds(fact: Any, wanted: str | int) -> bool:
    return (
        wanted in fact
        if isinstance(fact, Collection) and not isinstance(fact, str)
        else fact == wanted
    )


def _strike(name: str, armed: ArmedPoint) -> None:
    if armed.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif armed.action == "pause":
        time.sleep(armed.pause_s)
    elif armed.action == "raise":
        raise Struck(name)
