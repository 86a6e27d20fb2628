"""When each stage of a pipeline computes a step. Decides nothing: a head sends steps, and learns
when they are back.

Times are the planner's: what it predicts of a step is what the step takes here. A stage computes
one step after the other; so does a link with frames.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from shardline_costs import DeviceProfile, Link, ModelCosts
from shardline_costs.prediction import StageAssignment
from shardline_costs.step_cost import compute_s, frame_bytes, frames_s
from shardline_costs.workload import StepKind

HEAD_STEP_S = 5e-5
HEAD_ROW_S = 4e-6
"""What a head's Python takes for a step and for each of its rows: schedule, apply. With 64 decodes
0.3 ms, of which `make bench` measures 0.26 as `scheduler-share`."""


@dataclass(frozen=True, slots=True)
class Work:
    """What equal stages do: one result serves all of them."""

    profile: DeviceProfile
    kinds: tuple[tuple[str, int], ...]
    """Layers of each kind."""
    is_tail: bool

    @classmethod
    def of(cls, stage: StageAssignment, model: ModelCosts) -> Work:
        """Describes the work of one stage."""
        kinds = Counter(kind.name for kind in model.layers[stage.first : stage.stop])
        nameless = msgspec.structs.replace(stage.profile, device="", host="", machine="", links={})
        return cls(nameless, tuple(sorted(kinds.items())), stage.stop == len(model.layers))

    def seconds(self, model: ModelCosts, step: StepKind, *, has_frames: bool) -> float:
        """Returns the seconds of one step."""
        seconds = compute_s(self.profile, dict(self.kinds), step, is_tail=self.is_tail)
        return seconds + (frames_s(self.profile, model, step) if has_frames else 0.0)


class StageChain:
    """The stages of one pipeline in one epoch."""

    def __init__(
        self, model: ModelCosts, stages: Sequence[StageAssignment], slower_s: float = 0.0
    ) -> None:
        self.slower_s = slower_s
        """What each frame takes more, now."""
        self.stages = tuple(stages)
        self._model = model
        self._works: list[Work] = []
        self._work_of: list[int] = []
        for stage in stages:
            self._note(Work.of(stage, model))
        self._links: list[Link] = [one.link(other) for one, other in pairwise([*stages, stages[0]])]
        self._free_s = [0.0] * len(stages)
        self._link_free_s = [0.0] * len(stages)
        self._answered_s = 0.0

    @property
    def num_stages(self) -> int:
        """Returns the number of stages of the pipeline."""
        return len(self._work_of)

    def send(self, now_s: float, step: StepKind, num_rows: int) -> tuple[float, float]:
        """A step begins at its head. Returns when the head may begin the next, and when the answer
        is there."""
        times = [
            work.seconds(self._model, step, has_frames=self.num_stages > 1) for work in self._works
        ]
        head_s = HEAD_STEP_S + HEAD_ROW_S * num_rows
        size = frame_bytes(self._works[0].profile, self._model, step)
        at_s = now_s
        last = self.num_stages - 1
        for place, work in enumerate(self._work_of):
            busy_s = times[work] + (head_s if place == 0 else 0.0)
            at_s = max(at_s, self._free_s[place]) + busy_s
            self._free_s[place] = at_s
            if last:
                at_s = self._arrived(place, at_s, size if place < last else 0.0)
        self._answered_s = max(at_s, self._answered_s)
        return self._free_s[0], self._answered_s

    def _arrived(self, place: int, sent_s: float, num_bytes: float) -> float:
        link = self._links[place]
        self._link_free_s[place] = (
            max(sent_s, self._link_free_s[place]) + num_bytes / link.bytes_per_s
        )
        return self._link_free_s[place] + link.latency_s + self.slower_s

    def _note(self, work: Work) -> None:
        if work not in self._works:
            self._works.append(work)
        self._work_of.append(self._works.index(work))
