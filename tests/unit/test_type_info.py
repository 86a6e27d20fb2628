"""No thread reads with a type of which msgspec knows nothing yet, or half of it: the process would
die."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# What msgspec makes of a type it asks this function for, in Python: a profile sees it.
SEEN = """
import sys
made = []
def look(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        made.append(frame.f_locals["obj"].__qualname__)
sys.setprofile(look)
"""

FIRST_REQUEST = """
from shardline.contract.request_parsing import parse_params, parse_request
parse_request({"model": "m", "messages": [{"role": "user", "content": "a"}]})
parse_params({})
"""

FIRST_RESULT = """
from shardline.store.connection import encoding
encoding.load_logprobs([[1, -0.5, []]])
"""

EVERY_STRUCT = """
import msgspec
from shardline.base.type_info import loaded_structs
assert len(kinds := [*loaded_structs()]) > 30
for kind in kinds:
    msgspec.json.Decoder(kind)
"""

GATEWAY = """
from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings
create_app(GatewaySettings(database_url="postgresql://nowhere/x", redis_url="redis://nowhere"))
"""

RELAY = "import services.relay.app"


@pytest.mark.parametrize(
    ("before", "first"),
    [
        ("import shardline.client", FIRST_REQUEST + FIRST_RESULT),
        (GATEWAY, EVERY_STRUCT),
        (RELAY, EVERY_STRUCT),
    ],
    ids=["client", "gateway", "relay"],
)
def test_types_are_known_before_a_thread_can_read_with_them(
    before: str, first: str, tmp_path: Path
) -> None:
    program = f"{before}\n{SEEN}{first}\nsys.setprofile(None)\nprint(made)\n"
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={
            "PATH": "",
            "HOME": str(tmp_path),
            "SHARDLINE_DATABASE_URL": "postgresql://nowhere/x",
            "SHARDLINE_REDIS_URL": "redis://nowhere",
        },
    )
    assert process.stdout == "[]\n"
