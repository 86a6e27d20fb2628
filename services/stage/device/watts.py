"""What devices draw by public figures, where nothing measures them. Owns the table; knows no meter.

Cores: Cloud Carbon Footprint's averages of a virtual CPU, from SPECpower's servers. Accelerators:
the maker's board power (TDP), found by words of the name that the driver gives. Sources:
docs/cost.md.
"""

from __future__ import annotations

from dataclasses import dataclass

IDLE_SHARE = 0.115
"""Of its board power an idle accelerator draws so much, by the same source: 46 of 400 W, 8 of
70."""

ACCELERATORS = (
    ("B200", 1000.0),
    ("H200 NVL", 600.0),
    ("H200", 700.0),
    ("H100 NVL", 400.0),
    ("H100 PCIe", 350.0),
    ("H100", 700.0),
    ("A100 80GB PCIe", 300.0),
    ("A100-PCIE-40GB", 250.0),
    ("A100", 400.0),
    ("L40S", 350.0),
    ("L40", 300.0),
    ("L4", 72.0),
    ("A40", 300.0),
    ("A30", 165.0),
    ("A10G", 150.0),
    ("A10", 150.0),
    ("T4", 70.0),
    ("V100", 300.0),
    ("RTX 5090", 575.0),
    ("RTX 4090", 450.0),
    ("RTX 4080", 320.0),
    ("RTX 3090", 350.0),
    ("RTX A6000", 300.0),
    ("RTX 6000 Ada", 300.0),
    ("MI300X", 750.0),
)
"""Words of a name and watts. The first that stand in a name count, so those of a variant go
first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watts:
    """What a device draws while it computes and while it does not."""

    busy: float
    idle: float

    @classmethod
    def of_cores(cls, num_cores: int) -> Watts:
        """Returns the figures of `num_cores` logical cores."""
        return cls(busy=3.5 * num_cores, idle=0.74 * num_cores)

    @classmethod
    def of_board(cls, watts: float) -> Watts:
        """Returns the figures of an accelerator with a board that draws `watts`."""
        return cls(busy=watts, idle=IDLE_SHARE * watts)

    @classmethod
    def of_accelerator(cls, model: str) -> Watts | None:
        """Returns the figures of an accelerator by the name that its driver gives it; None if the
        table lacks it."""
        words = f" {_spaced(model)} "
        found = (watts for name, watts in ACCELERATORS if f" {_spaced(name)} " in words)
        board = next(found, None)
        return None if board is None else cls.of_board(board)


def _spaced(name: str) -> str:
    return name.replace("-", " ").lower()
