"""What tables are made of: columns, constraints and indexes of one kind, and their names. Knows no
table."""

from __future__ import annotations

from typing import Any

from sqlalchemy import TIMESTAMP, CheckConstraint, Column, Index, MetaData, text
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData(
    naming_convention={
        "pk": "%(table_name)s_pkey",
        "fk": "%(table_name)s_%(column_0_name)s_fkey",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ck": "%(table_name)s_%(constraint_name)s",
    }
)


def one_of(column: str, values: tuple[str, ...]) -> str:
    """Returns the rule that a column has one of these values."""
    return f"{column} IN ({', '.join(repr(str(value)) for value in values)})"


def time_of(name: str, **options: Any) -> Column[Any]:
    """Returns a column of moments."""
    return Column(name, TIMESTAMP(timezone=True), **options)


def created(name: str) -> Column[Any]:
    """Returns a column of moments that Postgres fills in."""
    return time_of(name, nullable=False, server_default=text("now()"))


def json_object(name: str) -> Column[Any]:
    """Returns a column of JSON objects, empty by default."""
    return Column(name, JSONB, nullable=False, server_default=text("'{}'"))


def checks(**rules: str) -> list[CheckConstraint]:
    """Returns constraints by their names."""
    return [CheckConstraint(rule, name=name) for name, rule in rules.items()]


def partial_index(name: str, *columns: Column[Any], where: str) -> Index:
    """Makes an index of the rows that a rule is true of."""
    return Index(name, *columns, postgresql_where=text(where))
