"""What a chaos run finds in its logs that is private."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.judge.secrecy import passwords, prompts, told
from tests.integration.rows import database_with_head, submit

SECRET = 'zwölf Wörter,\n"die" niemand liest'


@pytest.mark.parametrize(
    "line", [SECRET, json.dumps({"event": SECRET}), json.dumps(SECRET, ensure_ascii=False)]
)
def test_a_secret_is_found_however_a_line_writes_it(tmp_path: Path, line: str) -> None:
    guilty = tmp_path / "relay.log"
    innocent = tmp_path / "gateway.log"
    guilty.write_text(f"before\n{line}\nafter", encoding="utf-8")
    innocent.write_text("before\nafter", encoding="utf-8")

    (finding,) = told([innocent, guilty], {SECRET, "another that nobody told"})

    assert (finding.invariant, finding.count) == ("I12", "told_secrets")
    assert "relay.log" in finding.what
    assert SECRET not in finding.what


def test_prompts_of_rows_and_passwords_of_urls_are_looked_for(database_url: str) -> None:
    with database_with_head(database_url) as engine:
        submit(engine, prompt="a prompt of a row")
    assert prompts(database_url) == {"a prompt of a row"}
    assert passwords(["redis://:abc@h:1/0", "http://h", "postgresql://me:def@/db?host=/tmp"]) == {
        "abc",
        "def",
    }
