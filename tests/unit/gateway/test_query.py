"""A query's values that its parameters do not allow are refused with the limit."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from services.gateway import routes
from services.gateway.http.query import described, query_of
from shardline.base.errors import Invalid

ROUTES = [import_module(f"{routes.__name__}.{each.name}") for each in iter_modules(routes.__path__)]
KINDS: set[type[Any]] = {
    value
    for module in ROUTES
    for name, value in vars(module).items()
    if name.endswith("Query") and isinstance(value, type) and issubclass(value, msgspec.Struct)
}


class TextQuery(msgspec.Struct):
    """Has a text of each limit."""

    code: Annotated[str, Meta(pattern="^[a-z]+$")] = "a"
    name: Annotated[str, Meta(max_length=4)] = ""
    order: Annotated[str, Meta(min_length=2, max_length=3)] = "asc"


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("code", "1", "0 to any number of characters that match ^[a-z]+$"),
        ("name", "abcde", "Send 0 to 4 characters"),
        ("order", "a", "Send 2 to 3 characters"),
    ],
)
def test_a_text_over_its_limit_is_refused_with_the_limit(name: str, text: str, remedy: str) -> None:
    with pytest.raises(Invalid) as raised:
        query_of([(name, text)], TextQuery)
    assert raised.value.field == name
    assert remedy in raised.value.remedy


@pytest.mark.parametrize("kind", sorted(KINDS, key=str))
@pytest.mark.parametrize("text", ["", "-1", "9" * 40, "é" * 9000])
def test_no_value_of_a_parameter_is_the_servers_fault(
    kind: type[msgspec.Struct], text: str
) -> None:
    for name in described(kind):
        assert field_refused(kind, name, text) in (name, None)


def field_refused(kind: type[msgspec.Struct], name: str, text: str) -> str | None:
    """Returns the field that is refused, or None."""
    try:
        query_of([(name, text)], kind)
    except Invalid as error:
        return error.field
    return None
