"""docs/models.md says of every family of causal LMs what stages make of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.stage.device.device import Device
from tests.conformance.families import FAMILIES, row_of, rows

ROWS = rows()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_what_the_table_says(family: str, tmp_path: Path, device: Device) -> None:
    assert str(row_of(family, tmp_path, device)) == ROWS[family]


def test_the_table_has_no_family_twice_and_every_tested_one() -> None:
    assert len(ROWS) == len(set(ROWS))
