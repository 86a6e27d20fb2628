"""How many steps a pipeline has in flight: the rule that heads follow and plans count on. Pure."""

from __future__ import annotations

MAX_LANES = 16
"""With 64 seats a step of one more lane would have less than 4 decodes, and cost what one of 4
does."""


def lanes_for(num_stages: int, round_trip_s: float, step_s: float) -> int:
    """Returns as many lanes as there are stages, and one more for each step that a stage could
    compute while a frame is on links: `round_trip_s` seconds of a round, of which a stage is busy
    for `step_s` with each step.

    A step_s of 0 is not known yet: then the stages alone count.
    """
    num_on_links = round(round_trip_s / step_s) if step_s > 0 else 0
    return max(num_stages, min(MAX_LANES, num_stages + num_on_links))
