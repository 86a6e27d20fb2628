"""The command as a program: what a damaged up.json or a narrow encoding makes of its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardline.base.errors import Invalid
from shardline.cli.local_stack import local_gateway
from tests.repository import REPOSITORY

MAIN = "from shardline.cli import main; main()"


def ran(code: str, cwd: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """A program of the command line, which has ended."""
    environment = {name: value for name, value in os.environ.items() if "SHARDLINE" not in name}
    paths = os.pathsep.join((str(REPOSITORY / "shared"), str(REPOSITORY)))
    return subprocess.run(
        [sys.executable, "-c", code, "models", *arguments],
        env={**environment, "PYTHONPATH": paths, **settings},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_damaged_up_json_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "up.json").write_text("{")
    ended = ran(MAIN, tmp_path, SHARDLINE_HOME=str(tmp_path))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"{tmp_path / 'up.json'}: it is damaged")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("content", ["", "[]", '{"urls": {}}'])
def test_what_is_no_up_json_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    (tmp_path / "up.json").write_text(content)
    with pytest.raises(Invalid, match="it is damaged"):
        local_gateway(tmp_path)


def test_help_needs_no_up_json(tmp_path: Path) -> None:
    (tmp_path / "up.json").write_text("{")
    ended = ran(MAIN, tmp_path, "--help", SHARDLINE_HOME=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")


def test_text_that_a_stream_cannot_encode_is_escaped_as_in_json(tmp_path: Path) -> None:
    texts = ["ф", "\N{GRINNING FACE}"]
    program = (
        "import json; from shardline.base.streams import escape_unencodable; "
        "from shardline.cli import show; escape_unencodable()\n"
        f"for text in {texts}:\n"
        "    show.as_json(text); print(json.dumps(text, ensure_ascii=False))"
    )
    ended = ran(program, tmp_path, PYTHONIOENCODING="latin-1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.isascii()
    shown = [json.loads(line) for line in ended.stdout.splitlines()]
    assert shown == [text for text in texts for _ in range(2)]
