"""Whether anything private stands where operators look: logs, and what a supervisor prints. Knows
no service."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from shardline.contract.api_key import PREFIX
from tests.chaos.report.finding import Finding
from tests.poisoned_messages import SECRET

MIN_CHARS = 12
"""Shorter prompts may stand in a log by chance."""
MAX_PROMPTS = 500
"""Each is looked for in each file."""

PROMPTS = f"""
SELECT prompt FROM jobs WHERE length(prompt) >= {MIN_CHARS}
UNION
SELECT message->>'content' FROM jobs CROSS JOIN LATERAL jsonb_array_elements(messages) AS message
WHERE jsonb_typeof(messages) = 'array' AND length(message->>'content') >= {MIN_CHARS}
LIMIT {MAX_PROMPTS}
"""


def prompts(database_url: str) -> set[str]:
    """Of jobs, whatever became of them."""
    with psycopg.connect(database_url) as connection:
        return {prompt for (prompt,) in connection.execute(PROMPTS)}


def passwords(urls: Iterable[str]) -> set[str]:
    """Those of URLs that have one."""
    return {found for url in urls if (found := urlsplit(url).password)}


def secrets(database_url: str, urls: Mapping[str, str]) -> set[str]:
    """All that a stack must not tell, bad messages included: `urls` has its `api_key` too."""
    return {
        SECRET,
        urls["api_key"].removeprefix(PREFIX),
        *prompts(database_url),
        *passwords(urls.values()),
    }


def told(files: Sequence[Path], secrets: Iterable[str]) -> list[Finding]:
    """I12: what of these stands in which file."""
    wanted = [(secret, _forms(secret)) for secret in sorted(secrets) if len(secret) >= MIN_CHARS]
    found = []
    for file in files:
        content = file.read_bytes()
        for secret, forms in wanted:
            if any(form in content for form in forms):
                what = f"{file.name} holds {secret[:MIN_CHARS]}…"
                found.append(Finding(invariant="I12", count="told_secrets", what=what))
    return found


def _forms(secret: str) -> set[bytes]:
    """As it is, and as JSON and Python write it in a line."""
    written = (json.dumps(secret), json.dumps(secret, ensure_ascii=False))
    return {
        secret.encode(),
        repr(secret)[1:-1].encode(),
        *(form[1:-1].encode() for form in written),
    }
