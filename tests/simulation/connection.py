"""A connection to the tables in memory: the store's own functions run over it. Knows no row.

A statement is looked up among the twins, its parameters are those that Postgres would get, and its
answer reads as SQLAlchemy's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy.engine.result import IteratorResult, ScalarResult, SimpleResultMetaData
from sqlalchemy.sql import Executable

from tests.simulation import pipeline_statements, relay_statements, statements
from tests.simulation.rows import Rows, Tables, Twin

TWINS: Mapping[Executable, Twin] = {
    **statements.TWINS,
    **relay_statements.TWINS,
    **pipeline_statements.TWINS,
}

NOTHING = ("nothing",)
"""The columns of no rows."""


class Answer(IteratorResult[Any]):
    """What a twin gave: rows, or how many rows it changed."""

    def __init__(self, answer: Rows | int) -> None:
        rows: Rows = [] if isinstance(answer, int) else answer
        self.rowcount = answer if isinstance(answer, int) else len(rows)
        columns = tuple(rows[0]) if rows else NOTHING
        super().__init__(_metadata(columns), iter([tuple(row.values()) for row in rows]))


@dataclass(frozen=True, slots=True)
class Connection:
    """One transaction: all that it does happens at one moment."""

    tables: Tables

    def execute(self, statement: Executable, parameters: Mapping[str, Any] | None = None) -> Answer:
        """As SQLAlchemy's. Raises NotImplementedError for a statement that has no twin."""
        twin = TWINS.get(statement)
        if twin is None:
            raise NotImplementedError(
                f"no twin of the statement: {' '.join(str(statement).split())[:200]}"
            )
        return Answer(twin(self.tables, **(parameters or {})))

    def scalars(
        self, statement: Executable, parameters: Mapping[str, Any] | None = None
    ) -> ScalarResult[Any]:
        """The first column of each row."""
        return self.execute(statement, parameters).scalars()

    def scalar(self, statement: Executable, parameters: Mapping[str, Any] | None = None) -> Any:
        """The first column of the first row; None without one."""
        return self.execute(statement, parameters).scalar()


@lru_cache
def _metadata(columns: tuple[str, ...]) -> SimpleResultMetaData:
    return SimpleResultMetaData(columns)
