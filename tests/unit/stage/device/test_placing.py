"""What a stage refuses before it takes its device."""

from __future__ import annotations

import pytest

from services.stage.runtime import place
from services.stage.settings import StageSettings
from shardline.base.errors import Invalid


def test_offload_without_the_prefix_cache_is_refused() -> None:
    settings = StageSettings(model="m", kv_offload_mib=64, prefix_cache=False)
    with pytest.raises(Invalid, match="SHARDLINE_PREFIX_CACHE") as refused:
        place(settings)
    assert refused.value.field == "SHARDLINE_KV_OFFLOAD_MIB"


def test_further_models_without_a_fleet_are_refused() -> None:
    with pytest.raises(Invalid, match=r"only a fleet changes models.*SHARDLINE_LAYERS=planned"):
        place(StageSettings(model="m", layers="0-3", further_models="small=/models/a"))
