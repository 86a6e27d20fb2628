"""Translates Postgres's error of a full quota. The functions of the migrations write it in one form
for every door. Asks nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardline.base.errors import LimitExceeded

SQLSTATE = "53400"
"""configuration_limit_exceeded: the trigger's, for a row that its door has not asked about."""

WORDS: Mapping[str, str] = {
    "requests_per_min": "requests a minute",
    "tokens_per_min": "tokens a minute",
    "max_queued": "queued jobs",
    "max_bytes": "stored bytes",
    "budget_tokens": "tokens of its budget",
    "budget_money": "of its budget's money",
}


def limit_error(excess: Mapping[str, Any]) -> LimitExceeded:
    """Makes the error of what `shardline_quota_excess` returned."""
    key = excess["key_name"]
    holder = f"the API key {key}" if key else f"the tenant {excess['tenant']}"
    what = WORDS[excess["name"]]
    problem = (
        f"{holder} has taken {excess['taken']} of {excess['most']} {what}, "
        f"and this asks for {excess['asked']}"
    )
    left = {
        kind: (int(excess[kind]), int(excess[f"{kind}_left"]))
        for kind in ("requests", "tokens")
        if excess[kind] is not None
    }
    after_s = excess["retry_after_s"]
    return LimitExceeded(excess["name"], problem, retry_after_s=after_s, left=left)


def limit_error_of(cause: BaseException | None) -> LimitExceeded | None:
    """The error of a driver's, if the trigger raised it."""
    if getattr(cause, "sqlstate", None) != SQLSTATE:
        return None
    detail = getattr(getattr(cause, "diag", None), "message_detail", None)
    return None if detail is None else limit_error(json.loads(detail))
