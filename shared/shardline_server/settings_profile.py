"""A settings profile: tuned settings in a file of lines such as SHARDLINE_SEATS=96, read beneath
the environment.

Docker Compose reads the same file with `--env-file`. Tunes nothing: that is `shardline tune`.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

from dotenv import dotenv_values
from pydantic import Field, model_validator

from shardline.base.config import ENV_PREFIX, Settings
from shardline.base.errors import Invalid

FIELD = f"{ENV_PREFIX}PROFILE"
PROFILE_SETTINGS = (
    "seats",
    "token_budget",
    "lanes",
    "dtype",
    "split",
    "num_stages",
    "stages",
    "replicas",
)
"""What a profile may set: fields of a stage's settings and of `make up`'s, each of which takes its
own."""


def read_profile(path: Path) -> dict[str, str]:
    """The settings of a profile by field. Raises Invalid if the file cannot be read, or names
    anything else."""
    try:
        found = dotenv_values(stream=StringIO(path.read_text(encoding="utf-8")), interpolate=False)
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(
            FIELD, f"{path} cannot be read: {error}", "Give a file that `shardline tune` wrote"
        ) from error
    known = {ENV_PREFIX + name.upper(): name for name in PROFILE_SETTINGS}
    if unknown := sorted(found.keys() - known.keys()):
        problem = f"{path} has {', '.join(unknown)}; a profile sets {', '.join(known)}"
        raise Invalid(FIELD, problem, "Set others in the environment")
    return {known[name]: value for name, value in found.items() if value}


class ProfiledSettings(Settings):
    """Settings of a service that has some of those that are tuned."""

    profile: Path | None = Field(
        None,
        description="file of tuned settings, as `shardline tune` writes it; "
        "the environment overrides it",
    )

    @model_validator(mode="before")
    @classmethod
    def _add_profile(cls, values: dict[str, Any]) -> dict[str, Any]:
        profile = read_profile(Path(values["profile"])) if values.get("profile") else {}
        return {name: value for name, value in profile.items() if name in cls.model_fields} | values
