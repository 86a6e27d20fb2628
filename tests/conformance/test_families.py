"""docs/models.md says of every family of causal LMs what stages make of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.stage.device.device import Device
from tests.conformance.families import BEGIN, END, FAMILIES, PAGE, outcome_of, outcomes

OUTCOMES = outcomes()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_what_the_table_says(family: str, tmp_path: Path, device: Device) -> None:
    assert outcome_of(family, tmp_path, device) == OUTCOMES[family]


def test_the_table_has_each_family_once() -> None:
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert sorted(re.findall(r"`([\w-]+)`", table)) == sorted(FAMILIES)
