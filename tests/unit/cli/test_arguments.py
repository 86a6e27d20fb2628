"""What the command line makes of what is typed, without any server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardline.base.errors import Invalid
from shardline.cli.commands import cli
from shardline.cli.fields import parse_fields, prompt_fields

COMMANDS = ["submit", "wait", "stream", "get", "list", "cancel", "pipelines", "models", "cost"]
NOWHERE = {"SHARDLINE_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"}
JOB = "01890a5d-ac96-774b-bcce-b302099a8057"


def test_fields_are_read_as_json_or_else_as_text() -> None:
    assert parse_fields(
        ["top_p=0.9", 'stop=["\\n"]', "idempotency_key=order-7", "ignore_eos=true", "traceparent="]
    ) == {
        "top_p": 0.9,
        "stop": ["\n"],
        "idempotency_key": "order-7",
        "ignore_eos": True,
        "traceparent": "",
    }


@pytest.mark.parametrize("assignment", ["top_p", "=1", ""])
def test_a_field_without_a_value_names_the_option(assignment: str) -> None:
    with pytest.raises(Invalid, match="--field"):
        parse_fields([assignment])


def test_a_prompt_with_a_system_message_is_a_chat() -> None:
    assert prompt_fields("hi", chat=False, system=None) == {"prompt": "hi"}
    assert prompt_fields("hi", chat=True, system=None) == {
        "messages": [{"role": "user", "content": "hi"}]
    }
    roles = [
        message["role"]
        for message in prompt_fields("hi", chat=False, system="be short")["messages"]
    ]
    assert roles == ["system", "user"]


def test_help_lists_every_command_and_exit_status() -> None:
    shown = CliRunner().invoke(cli, ["--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert [name for name in [*COMMANDS, "trace", "124"] if name not in shown.stdout] == []


def test_a_shell_completes_commands() -> None:
    asked = {"COMP_WORDS": "shardline te", "COMP_CWORD": "1"}
    completed = subprocess.run(
        [Path(sys.executable).with_name("shardline")],
        env={**os.environ, "_SHARDLINE_COMPLETE": "complete_bash", **asked},
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.split() == ["tenant"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_says_what_it_does(command: str) -> None:
    shown = CliRunner().invoke(cli, [command, "--help"])
    assert shown.exit_code == 0
    assert "--json" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "env", "status", "problem"),
    [
        (["submit", "hi", "--model", "m", "-f", "temprature=1"], {}, 2, "temprature"),
        (["submit", "", "--model", "m"], {}, 2, "prompt: it is empty"),
        (["submit", "hi", "--model", "m", "--after", "7"], {}, 2, "depends_on[0].job"),
        (["submit", "hi", "--model", "m", "--after", f"{JOB}=a"], {}, 2, "no text has {{a}}"),
        (
            ["submit", "hi", "--model", "m", "-f", "flexible=price"],
            {},
            2,
            "flexible: without a deadline",
        ),
        (
            ["submit", "hi", "--model", "m", "-f", "flexible=cheap", "-f", "deadline_s=9"],
            {},
            2,
            "flexible",
        ),
        (
            ["submit", "hi", "--model", "m"],
            {"SHARDLINE_DATABASE_URL": "mysql://x/y"},
            2,
            "database_url",
        ),
        (
            ["submit", "hi", "--model", "m"],
            {"SHARDLINE_TIME_SCALE": "soon"},
            2,
            "SHARDLINE_TIME_SCALE",
        ),
        (["submit", "hi", "--model", "m"], {}, 4, "Postgres cannot be reached"),
        (["get", JOB], {}, 4, "Postgres cannot be reached"),
        (["get", "7"], {}, 2, "UUID"),
        (["list", "--state", "asleep"], {}, 2, "queued"),
        (["trace"], {}, 4, "Postgres cannot be reached"),
        (["trace", "--timeout-s", "0"], {}, 2, "0.1"),
    ],
)
def test_an_impossible_command_says_why_in_one_line(
    arguments: list[str], env: dict[str, str], status: int, problem: str
) -> None:
    ran = CliRunner().invoke(cli, arguments, env={**NOWHERE, **env})
    assert ran.exit_code == status, ran.output
    assert problem in ran.stderr
    assert "Traceback" not in ran.output
