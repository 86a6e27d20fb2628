"""What the command line makes of what is typed, without any server."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from shardline.cli.commands import cli
from shardline.cli.fields import parse_fields, prompt_fields
from shardline.errors import Invalid

COMMANDS = ["submit", "wait", "stream", "get", "list", "cancel", "pipelines", "models"]
NOWHERE = {"SHARDLINE_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"}
JOB = "01890a5d-ac96-774b-bcce-b302099a8057"


def test_given_fields_as_typed_when_parsed_then_json_is_read_and_the_rest_is_text() -> None:
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
def test_given_no_assignment_when_parsed_then_the_option_is_named(assignment: str) -> None:
    with pytest.raises(Invalid, match="--field"):
        parse_fields([assignment])


def test_given_a_system_message_when_the_prompt_is_put_together_then_it_is_a_chat() -> None:
    assert prompt_fields("hi", chat=False, system=None) == {"prompt": "hi"}
    assert prompt_fields("hi", chat=True, system=None) == {"messages": [{"role": "user", "content": "hi"}]}
    roles = [message["role"] for message in prompt_fields("hi", chat=False, system="be short")["messages"]]
    assert roles == ["system", "user"]


def test_given_help_when_asked_for_then_every_command_and_exit_status_is_there() -> None:
    shown = CliRunner().invoke(cli, ["--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert [name for name in [*COMMANDS, "124"] if name not in shown.stdout] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_given_any_command_when_its_help_is_asked_for_then_it_says_what_it_does(command: str) -> None:
    shown = CliRunner().invoke(cli, [command, "--help"])
    assert shown.exit_code == 0
    assert "--json" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "env", "status", "problem"),
    [
        (["submit", "hi", "--model", "m", "-f", "temprature=1"], {}, 2, "temprature"),
        (["submit", "", "--model", "m"], {}, 2, "prompt: it is empty"),
        (["submit", "hi", "--model", "m"], {"SHARDLINE_DATABASE_URL": "mysql://x/y"}, 2, "database_url"),
        (["submit", "hi", "--model", "m"], {"SHARDLINE_TIME_SCALE": "soon"}, 2, "SHARDLINE_TIME_SCALE"),
        (["submit", "hi", "--model", "m"], {}, 4, "Postgres cannot be reached"),
        (["get", JOB], {}, 4, "Postgres cannot be reached"),
        (["get", "7"], {}, 2, "UUID"),
        (["list", "--state", "asleep"], {}, 2, "queued"),
    ],
)
def test_given_what_cannot_be_when_a_command_runs_then_one_line_says_why(
    arguments: list[str], env: dict[str, str], status: int, problem: str
) -> None:
    ran = CliRunner().invoke(cli, arguments, env={**NOWHERE, **env})
    assert ran.exit_code == status, ran.output
    assert problem in ran.stderr
    assert "Traceback" not in ran.output
