"""What a service's settings show of what is in them: no password, no key, not even a wrong one."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.gateway.settings import GatewaySettings
from services.relay.settings import RelaySettings
from services.stage.settings import StageSettings
from services.standalone.settings import StandaloneSettings
from shardline.base.config import Settings

SECRET = "sesame-4711-open"
KINDS = (GatewaySettings, RelaySettings, StageSettings, StandaloneSettings)


@pytest.mark.parametrize("kind", KINDS)
def test_no_settings_show_a_password(kind: type[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "REDIS_URL", "RESULT_BACKEND", "ENERGY_PRICE", "ENERGY_CARBON"):
        scheme = {"DATABASE_URL": "postgresql", "REDIS_URL": "redis"}.get(name, "https")
        monkeypatch.setenv(f"SHARDLINE_{name}", f"{scheme}://me:{SECRET}@host/0")
    monkeypatch.setenv("SHARDLINE_HOP_SECRET_KEY", "ab" * 32)
    monkeypatch.setenv("SHARDLINE_MODEL", "m")

    shown = repr(kind()) + str(kind())

    assert SECRET not in shown
    assert "ab" * 32 not in shown


@pytest.mark.parametrize("kind", KINDS)
def test_a_setting_that_is_refused_is_not_shown(
    kind: type[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLINE_MODEL", "m")
    monkeypatch.setenv("SHARDLINE_TIME_SCALE", SECRET)
    with pytest.raises(ValidationError, match="time_scale") as caught:
        kind()
    assert SECRET not in str(caught.value)
