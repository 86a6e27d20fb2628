"""Fields of errors by the names that a door's bodies have for them. Knows no body."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shardline.base.errors import Invalid


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the field of an Invalid that passes: `names` has a door's names by those of jobs, and
    what follows a name stays (`messages[2].content`)."""
    try:
        yield
    except Invalid as error:
        for name, renamed in names.items():
            rest = error.field.removeprefix(name)
            if error.field.startswith(name) and rest[:1] in ("", ".", "["):
                error.field = renamed + rest
                error.args = (f"{error.field}: {error.problem}. {error.remedy}",)
                break
        raise
