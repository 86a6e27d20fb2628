"""OpenAI's `service_tier`: a priority by another name. Knows no request."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from shardline.contract.job import DEFAULT_PRIORITY, INTERACTIVE_PRIORITY

ServiceTier = Literal["auto", "default", "fast", "flex", "priority", "scale"]

PRIORITIES: Mapping[str, int] = MappingProxyType(
    {
        "auto": INTERACTIVE_PRIORITY,
        "default": INTERACTIVE_PRIORITY,
        "fast": 1,
        "flex": DEFAULT_PRIORITY,
        "priority": 1,
        "scale": INTERACTIVE_PRIORITY,
    }
)
"""Of a request that names no `priority`. `flex` gets the default priority of jobs."""

STANDS_FOR: Mapping[ServiceTier, ServiceTier] = MappingProxyType(
    {"auto": "default", "fast": "priority"}
)


def tier_used(asked: ServiceTier) -> ServiceTier:
    """Returns the tier that the answer shows; for `auto` and `fast` the one that they stand for."""
    return STANDS_FOR.get(asked, asked)
