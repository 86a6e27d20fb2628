"""Settings from the environment (`SHARDLINE_*`), and the protocol's times in one place. Knows no
server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from shardline.base.redis_url import SCHEMES, RedisAddress

ENV_PREFIX = "SHARDLINE_"


class Times(BaseModel):
    """The protocol's times, seconds. `scaled` shrinks all of them by one factor (tests)."""

    model_config = ConfigDict(frozen=True)

    lease_s: float = 10.0
    heartbeat_s: float = 1.0
    poll_s: float = 1.0
    resend_s: float = 15.0
    drain_s: float = 30.0
    link_dead_s: float = 3.0
    stall_s: float = 30.0
    unbind_s: float = 5.0
    recover_s: float = 60.0
    exact_wait_s: float = 60.0

    def scaled(self, factor: float) -> Times:
        """Every time multiplied by `factor`."""
        return Times(**{name: value * factor for name, value in self.model_dump().items()})

    @property
    def fence_margin_s(self) -> float:
        """A head stops emitting this long before its lease can expire by Postgres's clock."""
        return self.lease_s / 5

    @property
    def fence_s(self) -> float:
        """A head emits for this long after it sent a heartbeat."""
        return self.lease_s - self.fence_margin_s


class FileSecrets(PydanticBaseSettingsSource):
    """`SHARDLINE_X_FILE=/run/secrets/x` gives SHARDLINE_X, as Compose and Kubernetes mount
    secrets."""

    def get_field_value(
        self,
        field: FieldInfo,  # noqa: ARG002 (base's signature)
        field_name: str,
    ) -> tuple[Any, str, bool]:
        """The stripped content of the file that the variable names, if it is set."""
        path = os.environ.get(f"{ENV_PREFIX}{field_name.upper()}_FILE")
        return (Path(path).read_text(encoding="utf-8").strip() if path else None), field_name, False

    def __call__(self) -> dict[str, Any]:
        """All fields that have a file."""
        values = {
            name: self.get_field_value(field, name)[0]
            for name, field in self.settings_cls.model_fields.items()
        }
        return {name: value for name, value in values.items() if value is not None}


class Settings(BaseSettings):
    """What every service shares. Services extend it with their own fields."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
        # What is refused may be a key; the error names the setting and the rule.
        hide_input_in_errors=True,
    )

    database_url: SecretStr = Field(
        SecretStr("postgresql://shardline@localhost/shardline"),
        description="URL of Postgres 14 or later",
    )
    redis_url: str = Field(
        "redis://localhost:6379/0",
        repr=False,
        description="URL of Redis: Celery's broker, streams, stages' addresses; "
        "its data may be lost",
    )
    result_backend: str | None = Field(
        None,
        repr=False,
        description="Celery result backend for AsyncResult.get(): set it on relays and heads",
    )
    time_scale: float = Field(
        1.0,
        gt=0,
        le=10,
        description="factor on all of the protocol's times; the same for all services of a stack",
    )
    max_crashes: int = Field(
        3,
        ge=1,
        le=100,
        description="ceiling of every job's max_crashes; the same for relays and stages",
    )
    max_attempts: int = Field(
        32,
        ge=1,
        le=32,
        description="ceiling of every job's retry.max_attempts",
    )
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: str = Field(
        "auto",
        pattern="^(auto|json|console)$",
        description="form of log lines: json, console, or auto: console on a terminal, else json",
    )
    metrics_port: int | None = Field(
        None,
        description="port of GET /metrics, which asks for no key; "
        "`make up`: the first of one port for each process",
    )

    @field_validator("redis_url")
    @classmethod
    def _redis_can_be_reached(cls, url: str) -> str:
        """Checks that every library that a service uses can reach it. Raises Invalid."""
        RedisAddress.parse(url)
        return url

    @field_validator("result_backend")
    @classmethod
    def _results_can_be_stored(cls, url: str | None) -> str | None:
        """A Redis is checked as the broker is; other backends are Celery's matter. Raises
        Invalid."""
        if url is not None:
            result_address(url)
        return url

    @property
    def times(self) -> Times:
        """The protocol's times under `time_scale`."""
        return Times().scaled(self.time_scale)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 (base's signature)
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 (base's signature)
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then the environment, then `*_FILE`."""
        return init_settings, env_settings, FileSecrets(settings_cls)


def result_address(url: str) -> RedisAddress | None:
    """Returns the address of a result backend that is a Redis; None for other kinds. Raises
    Invalid."""
    is_redis = url.partition("://")[0] in SCHEMES
    return RedisAddress.parse(url, setting="result_backend") if is_redis else None
