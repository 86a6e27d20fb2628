"""Adapters for a model of the load: of unlike ranks and layers, strong enough that tokens differ,
the same every time.

`python -m tests.chaos.stack.adapters MODEL FOLDER NUM`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.adapters import ALL, save_adapter
from tests.chaos.load.workload import adapter_names

RANKS = (4, 9, 16)
TARGETS = (ALL, ("q_proj", "v_proj"), ("o_proj", "gate_proj", "down_proj"))
SCALE = 0.25
"""Of what they add: about a third of the demo model's own weights."""


def save(model: Path, folder: Path, num: int) -> None:
    """Writes so many into a folder."""
    for place, name in enumerate(adapter_names(num)):
        rank = RANKS[place % len(RANKS)]
        targets = TARGETS[place % len(TARGETS)]
        save_adapter(
            model, folder / name, targets=targets, rank=rank, seed=place, lora_alpha=SCALE * rank
        )


if __name__ == "__main__":
    save(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
