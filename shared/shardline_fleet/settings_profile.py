"""A settings profile: tuned settings in a file of lines such as SHARDLINE_SEATS=96, read beneath the environment.

Docker Compose reads the same file with `--env-file`. Tunes nothing: that is `shardline tune`.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from dotenv import dotenv_values
from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource
from typing_extensions import override

from shardline.base.config import ENV_PREFIX, Settings
from shardline.base.errors import Invalid

FIELD = f"{ENV_PREFIX}PROFILE"
PROFILE_SETTINGS = ("seats", "token_budget", "lanes", "dtype", "split", "num_stages", "stages", "replicas")
"""What a profile may set: fields of a stage's settings and of `make up`'s, each of which takes its own."""


def read_profile(path: Path) -> dict[str, str]:
    """The settings of a profile by field. Raises Invalid if the file cannot be read, or names anything else."""
    try:
        found = dotenv_values(stream=StringIO(path.read_text(encoding="utf-8")), interpolate=False)
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(FIELD, f"{path} cannot be read: {error}", "Give a file that `shardline tune` wrote") from error
    known = {ENV_PREFIX + name.upper(): name for name in PROFILE_SETTINGS}
    if unknown := sorted(found.keys() - known.keys()):
        problem = f"{path} has {', '.join(unknown)}; a profile sets {', '.join(known)}"
        raise Invalid(FIELD, problem, "Set others in the environment")
    return {known[name]: value for name, value in found.items() if value}


def profile_text(settings: Mapping[str, object], comments: list[str]) -> str:
    """The text of a profile with these settings, by field; none of None."""
    assert settings.keys() <= set(PROFILE_SETTINGS)
    lines = [f"{ENV_PREFIX}{name.upper()}={value}" for name, value in settings.items() if value is not None]
    return "\n".join([*(f"# {comment}" for comment in comments), *lines, ""])


class ProfileSource(PydanticBaseSettingsSource):
    """The values of the file that the setting `profile` names, as far as the class has fields for them."""

    @override
    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False

    @override
    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("profile")
        found = read_profile(Path(path)) if path else {}
        return {name: value for name, value in found.items() if name in self.settings_cls.model_fields}


class ProfiledSettings(Settings):
    """Settings of a service that has some of those that are tuned."""

    profile: Path | None = Field(
        None, description="file of tuned settings, as `shardline tune` writes it; the environment overrides it"
    )

    @classmethod
    @override
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *sources: Any, **named: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources of all settings, then the profile."""
        return (*super().settings_customise_sources(settings_cls, *sources, **named), ProfileSource(settings_cls))
