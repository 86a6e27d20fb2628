"""docs/reference/settings.md: every setting, from the classes that read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from docs.generated.tables import sentence, table
from services.gateway.settings import GatewaySettings
from services.relay.settings import RelaySettings
from services.stage.kernels.build import KernelSettings
from services.stage.settings import StageSettings
from services.standalone.settings import StandaloneSettings
from shardline.base.config import ENV_PREFIX, Settings
from shardline_server.failpoints import FailpointSettings

SECTIONS: dict[str, tuple[type[BaseSettings], ...]] = {
    "All services and the client": (Settings,),
    "Gateway": (GatewaySettings,),
    "Relay": (RelaySettings,),
    "Stage": (StageSettings, KernelSettings),
    "`make up`": (StandaloneSettings,),
    "Tests only": (FailpointSettings,),
}
"""Each heading with the classes of its table. What every class has stands under the first alone."""

INTRODUCTION = """# Settings

`make documents` writes this page from the settings classes. How settings are read, and which of
them to change:
[configure](../operating/configure.md). In parentheses: the range of values.
"""

DEFAULT = re.compile(r"[;.] default: (.+)$", re.IGNORECASE | re.DOTALL)
"""The end of a description whose default is no constant."""


def page() -> str:
    """Returns the page in Markdown."""
    return "\n".join([INTRODUCTION, *_sections()])


def _sections() -> Iterator[str]:
    """Yields the sections. A row that an earlier table has is named below the later one."""
    shown: set[tuple[str, str, str]] = set()
    for heading, kinds in SECTIONS.items():
        rows = [_cells(name, field) for kind in kinds for name, field in _own_fields(kind)]
        yield from (f"## {heading}", "")
        yield from table(
            "variable", "default", "meaning", rows=[each for each in rows if each not in shown]
        )
        if again := [each[0] for each in rows if each in shown]:
            yield from (f"As above: {', '.join(again)}.", "")
        shown |= set(rows)


def _own_fields(kind: type[BaseSettings]) -> Iterator[tuple[str, FieldInfo]]:
    """Yields the fields that are not those of every class."""
    for name, field in kind.model_fields.items():
        common = None if kind is Settings else Settings.model_fields.get(name)
        if common is None or common.description != field.description:
            yield name, field


def _cells(name: str, field: FieldInfo) -> tuple[str, str, str]:
    description = field.description or ""
    limits = _limits(field)
    default = " ".join(part for part in (_default(field), limits and f"({limits})") if part)
    return f"`{ENV_PREFIX}{name.upper()}`", default, sentence(DEFAULT.sub("", description))


def _default(field: FieldInfo) -> str:
    told = DEFAULT.search(field.description or "")
    if told is not None:
        return " ".join(told[1].split())
    if field.is_required():
        return "required"
    return _shown(field.default)


def _shown(value: Any) -> str:
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return (
        str(value)
        if isinstance(value, int)
        else f"`{value.value if isinstance(value, Enum) else value}`"
    )


def _limits(field: FieldInfo) -> str:
    """The range of a number, such as 1..64, >=1 or >0."""
    bounds = {
        kind: getattr(rule, kind)
        for rule in field.metadata
        for kind in ("ge", "gt", "le", "lt")
        if hasattr(rule, kind)
    }
    if "ge" in bounds and "le" in bounds:
        return f"{bounds['ge']}..{bounds['le']}"
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return ", ".join(f"{signs[kind]}{bound}" for kind, bound in bounds.items())
