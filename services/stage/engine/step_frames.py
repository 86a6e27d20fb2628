"""What leaves a stage after a step: frames of plans, activations and answers. Sends nothing.

Letters of shapes: T packed rows of the step, H the hidden size.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from services.stage.engine.tensors import name_of, view_of
from services.stage.hop import Frame, Kind
from services.stage.hop.frame import Buffer
from services.stage.hop.wiring import Wiring
from shardline_scheduler.step_plan import StepPlan, StepResult, encode


def step_frame(
    wiring: Wiring, plan: StepPlan, message: Buffer, out: Tensor | StepResult | None
) -> Frame:
    """Returns the plan with its activations for the next stage, [T, H] of the stage's dtype or
    int8, or the tail's answer for the head."""
    of_step = partial(Frame, pipeline=wiring.pipeline, epoch=wiring.epoch, step=plan.step)
    if isinstance(out, StepResult):
        return of_step(kind=Kind.RESULT, message=encode(out))
    if out is None or not plan.rows:
        return of_step(kind=Kind.PLAN, message=message)
    return of_step(
        kind=Kind.PLAN,
        message=message,
        tensor=view_of(out),
        dtype=name_of(out.dtype),
        shape=tuple(out.shape),
    )
