"""Models that stages have registered, so that every door can tokenize and refuse. Knows no
tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, bindparam, func, select, update
from sqlalchemy.dialects.postgresql import insert

from shardline.contract.tables import models

WRITABLE = tuple(
    column.name for column in models.columns if column.name not in ("updated_at", "adapters")
)

NEW = insert(models)
REGISTER = NEW.on_conflict_do_update(
    index_elements=[models.c.name],
    set_={
        **{name: NEW.excluded[name] for name in WRITABLE if name != "name"},
        "updated_at": func.now(),
    },
)
IS_REGISTERED = select(models.c.name).where(models.c.name == bindparam("name"))
MODEL = select(models).where(models.c.name == bindparam("name"))
CHOICES = select(models.c.name, models.c.chat_template.is_not(None)).order_by(models.c.name)
VERSIONS = select(models.c.name, models.c.fingerprint)
ADAPTERS = select(models.c.name, models.c.adapters)
REGISTER_ADAPTERS = (
    update(models).where(models.c.name == bindparam("model")).values(adapters=bindparam("found"))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """One of the models that a person may choose from."""

    name: str
    has_chat_template: bool


def register_model(connection: Connection, row: Mapping[str, Any]) -> None:
    """Registers what a head serves, with the fields of `models`. The newest word counts."""
    connection.execute(REGISTER, {name: row.get(name) for name in WRITABLE})


def is_registered(connection: Connection, name: str) -> bool:
    """Whether a head has registered it, and nobody has deleted it since."""
    return connection.scalar(IS_REGISTERED, {"name": name}) is not None


def get_model(connection: Connection, name: str) -> RowMapping | None:
    """The row of one model; None when no stage has registered it."""
    return connection.execute(MODEL, {"name": name}).mappings().one_or_none()


def get_models(connection: Connection) -> list[RowMapping]:
    """All rows, by name."""
    return list(connection.execute(select(models).order_by(models.c.name)).mappings())


def model_choices(connection: Connection) -> list[ModelChoice]:
    """All of them, by name, without the large columns."""
    rows = connection.execute(CHOICES)
    return [ModelChoice(name=name, has_chat_template=is_chat) for name, is_chat in rows]


def versions(connection: Connection) -> dict[str, str]:
    """Fingerprints by name, without the large columns."""
    return {row.name: row.fingerprint for row in connection.execute(VERSIONS)}


def register_adapters(connection: Connection, model: str, adapters: Mapping[str, str]) -> None:
    """Registers which adapters of its model a head has: fingerprints by name. The newest word
    counts."""
    connection.execute(REGISTER_ADAPTERS, {"model": model, "found": dict(adapters)})


def adapters(connection: Connection) -> dict[str, dict[str, str]]:
    """Fingerprints of adapters by name, by the name of their model."""
    return {row.name: row.adapters for row in connection.execute(ADAPTERS)}
