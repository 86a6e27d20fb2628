"""One worker's clock may jump: nothing but monotonic time and Postgres's now() decides anything of
the protocol."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.repository import REPOSITORY

WALL_CLOCKS = {
    "time.time",
    "time.time_ns",
    "time.CLOCK_REALTIME",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "date.today",
}
ONLY_SHOWN = {
    "services/gateway/openai/completion_response.py": "OpenAI's field `created`",
    "services/relay/celery/celery_request.py": (
        "Celery's `eta` and `expires`, which are times of its sender's clock"
    ),
    "services/relay/notices/webhook_client.py": (
        "the header `webhook-timestamp`, which receivers compare with their clocks"
    ),
    "shared/shardline/base/clock.py": "what `shardline trace` shows and `doctor` compares",
    "shared/shardline/contract/ids.py": (
        "the first bits of a job's id; order is Postgres's created_at"
    ),
    "shared/shardline_server/tokenize/chat.py": "the date that chat templates may print",
}
"""Files that read a wall clock, and what becomes of it."""

SUSPENDED = ("unshare", "--user", "--map-root-user", "--time", "--boottime=86400", "--fork")
"""Runs a command in a time namespace: there the machine has slept for a day, which its monotonic
clock left out."""


def reads_wall_clock(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.Attribute) and ast.unparse(node) in WALL_CLOCKS
        for node in ast.walk(tree)
    )


def test_wall_clocks_are_only_shown() -> None:
    sources = [
        path for folder in ("services", "shared") for path in (REPOSITORY / folder).rglob("*.py")
    ]
    assert sources

    found = {str(path.relative_to(REPOSITORY)) for path in sources if reads_wall_clock(path)}

    assert found == set(ONLY_SHOWN)


def test_stages_and_relays_read_time_from_one_module() -> None:
    sources = [
        path
        for folder in ("stage", "relay")
        for path in (REPOSITORY / "services" / folder).rglob("*.py")
    ]
    assert sources

    found = [
        path
        for path in sources
        if re.search(r"^(import|from) time\b", path.read_text("utf-8"), re.MULTILINE)
    ]

    assert found == [], (
        "take the clocks of shardline.base.clock: the simulation replaces those alone"
    )


def test_time_in_suspension_counts_for_leases() -> None:
    behind = "clock_gettime(CLOCK_BOOTTIME) - lease_clock_s()"
    code = f"from time import *; from shardline.base.clock import lease_clock_s; print({behind})"

    told = subprocess.run(
        (*sleeper(), sys.executable, "-c", code), check=True, capture_output=True, text=True
    )

    assert abs(float(told.stdout)) < 60


def sleeper() -> tuple[str, ...]:
    """SUSPENDED, where the system lends its users time namespaces. Where it does not, the test can
    see little."""
    is_lent = (
        shutil.which("unshare") and not subprocess.run((*SUSPENDED, "true"), check=False).returncode
    )
    return SUSPENDED if is_lent else ()
