"""The processes of a stage of several ranks, as they look from outside."""

from __future__ import annotations

import psutil


def other_ranks(stage: psutil.Process) -> list[psutil.Process]:
    """Returns the processes that a stage has started. Raises psutil.NoSuchProcess."""
    return [child for child in stage.children() if child.name().startswith("rank ")]
