"""Whom a stage obeys: one pipeline at a time, its highest epoch. Pure state: knows no socket, no
clock, no engine.

A stage cannot tell a true epoch from a false one: only Postgres knows them. So it remembers the
last one no longer than it keeps a silent head: an epoch that no head can pass (a forged HELLO, a
database restored from a backup) costs `unbind_s`, not the stage. A head of an old epoch that is
bound after that harms nothing: Postgres gives it no job.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from services.stage.pipeline.messages import ControlMessage, Hello, RefusalCode, Refuse
from shardline.contract.wire import StageCard


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundPipeline:
    """The pipeline that holds the stage."""

    pipeline: UUID
    epoch: int
    head: str
    max_lanes: int


class Binding:
    """Times are the caller's monotonic seconds."""

    def __init__(self, card: StageCard, unbind_s: float) -> None:
        self._card = card
        self._unbind_s = unbind_s
        self._heard_s = 0.0
        self._newest: tuple[UUID, int] | None = None
        self.bound: BoundPipeline | None = None

    def hello(self, hello: Hello, now_s: float) -> Refuse | None:
        """None: bound now, and anything older is void."""
        refusal = self._mismatch(hello) or self._busy(hello) or self._stale(hello, now_s)
        if refusal is not None:
            code, reason = refusal
            return Refuse(pipeline=hello.pipeline, epoch=hello.epoch, code=code, reason=reason)
        self.bound = BoundPipeline(
            pipeline=hello.pipeline, epoch=hello.epoch, head=hello.head, max_lanes=hello.max_lanes
        )
        self._newest = (hello.pipeline, hello.epoch)
        self._heard_s = now_s
        return None

    def obeys(self, message: ControlMessage, now_s: float) -> bool:
        """True for the pipeline and epoch that hold the stage; hearing them keeps it bound."""
        bound = self.bound
        if bound is None or (message.pipeline, message.epoch) != (bound.pipeline, bound.epoch):
            return False
        self._heard_s = now_s
        return True

    def is_silent(self, now_s: float, for_s: float) -> bool:
        """True when the head that holds the stage has been silent for so long."""
        return self.bound is not None and now_s - self._heard_s > for_s

    def release(self) -> None:
        """Free for any pipeline."""
        self.bound = None

    def _mismatch(self, hello: Hello) -> tuple[RefusalCode, str] | None:
        card = self._card
        layers = (hello.first_layer, hello.last_layer)
        own_layers = (card.first_layer, card.last_layer)
        checks = (
            (RefusalCode.MODEL, hello.model, card.model),
            (RefusalCode.WEIGHTS, hello.fingerprint, card.fingerprint),
            (RefusalCode.DTYPE, hello.dtype, card.dtype),
            (RefusalCode.LAYERS, "[{}, {})".format(*layers), "[{}, {})".format(*own_layers)),
        )
        for code, wanted, own in checks:
            if wanted != own:
                return code, f"the head wants {code} {wanted}, this stage has {own}"
        return None

    def _busy(self, hello: Hello) -> tuple[RefusalCode, str] | None:
        if self.bound is None or self.bound.pipeline == hello.pipeline:
            return None
        return (
            RefusalCode.BUSY,
            f"bound to pipeline {self.bound.pipeline} of head {self.bound.head}",
        )

    def _stale(self, hello: Hello, now_s: float) -> tuple[RefusalCode, str] | None:
        if (
            self._newest is None
            or self._newest[0] != hello.pipeline
            or hello.epoch > self._newest[1]
        ):
            return None
        if self._is_long_ago(now_s):
            return None
        problem = f"epoch {hello.epoch} is not above {self._newest[1]}"
        return (
            RefusalCode.STALE,
            f"{problem}, which this stage forgets after {self._unbind_s:g} s of silence",
        )

    def _is_long_ago(self, now_s: float) -> bool:
        return now_s - self._heard_s > self._unbind_s
