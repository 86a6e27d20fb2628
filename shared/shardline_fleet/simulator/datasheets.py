"""What vendors publish of accelerators, from datasheets.yaml. Knows no model."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec


class Datasheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator."""

    name: str
    memory_gb: float
    gb_per_s: float
    """Of its memory."""
    tflops: float
    """Dense products of `dtype`."""
    dtype: str
    """As SHARDLINE_DTYPE names it."""
    document: str
    """The vendor's."""


_FILE: Final = Path(__file__).with_name("datasheets.yaml")
DATASHEETS: Final = {
    sheet.name: sheet for sheet in msgspec.yaml.decode(_FILE.read_bytes(), type=list[Datasheet])
}
