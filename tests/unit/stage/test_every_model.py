"""The models of one worker, from its settings."""

from __future__ import annotations

import pytest

from services.stage.settings import PLANNED, StageSettings
from shardline.base.errors import Invalid


def test_a_worker_serves_its_own_model_unless_further_ones_are_named() -> None:
    (only,) = StageSettings(model="/models/big").every_model
    assert (only.name, only.model) == ("big", "/models/big")
    settings = StageSettings(
        model="/models/big",
        model_revision="main",
        layers=PLANNED,
        further_models="small=/models/a, org/coder",
    )
    found = [(each.name, each.model, each.model_revision) for each in settings.every_model]
    assert found == [
        ("big", "/models/big", "main"),
        ("small", "/models/a", None),
        ("coder", "org/coder", None),
    ]


def test_a_name_that_is_given_twice_is_refused() -> None:
    settings = StageSettings(
        model="/models/big", layers=PLANNED, further_models="big=/models/other"
    )
    with pytest.raises(Invalid, match=r"big is named twice.*NAME=FOLDER"):
        _ = settings.every_model
