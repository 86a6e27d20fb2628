"""Log lines: machines get one JSON object each, with the job's id and without passwords."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
import structlog

from shardline.base import log
from shardline.contract.api_key import new_key, parse_key

JOB = UUID(int=7)
SECRET = "nobody else may read this"
PASSWORD = "sesame-4711-open"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def raised(told: str) -> Exception:
    """An error with a cause, whose frame has a prompt among its locals."""
    prompt = SECRET
    try:
        int(told)
    except ValueError as cause:
        error = KeyError(told, len(prompt))
        error.__cause__ = cause
        return error
    raise AssertionError(told)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_each_json_line_of_a_job_carries_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(service="gateway", form="json")
    with log.job_context(JOB, attempt=2):
        structlog.get_logger("one").info("accepted", tokens=3)
    structlog.get_logger("one").warning("later")

    first, second = lines(capsys)

    assert (first["event"], first["job_id"], first["attempt"], first["tokens"]) == (
        "accepted",
        str(JOB),
        2,
        3,
    )
    assert (first["service"], first["level"], first["logger"]) == ("gateway", "info", "one")
    assert "job_id" not in second


def test_the_lines_of_libraries_look_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(service="relay", form="json")
    logging.getLogger("kombu").info("too much")
    logging.getLogger("celery").warning("lost %s", "redis://:secret@host:6379/0")

    (line,) = lines(capsys)

    assert (line["event"], line["service"]) == ("lost redis://:***@host:6379/0", "relay")


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize(
    "text",
    [
        "redis://:{}@host:6379/0",
        "postgresql+psycopg://me:{}@host/db and amqp://you:{}@other",
        "redis://:pass/{}:word@host:6379/0",
        "https://host/rates?securityToken={}&zone=1",
        "https://host/rates?zone=1&api_key={}",
        "rediss://host/0?ssl_keyfile_password={}",
        "host=localhost user=me password={} dbname=x",
        "Authorization: Bearer {}",
        "{{'authorization': 'Basic {}'}}",
        "no key sk-shardline-0123456789abcdef-{}",
    ],
)
def test_no_secret_is_logged_in_fields_messages_or_tracebacks(
    capsys: pytest.CaptureFixture[str], text: str, form: str
) -> None:
    log.configure(service="relay", form=form)
    told = text.format(PASSWORD, PASSWORD)
    structlog.get_logger("one").warning(
        told, field=told, inside={"a": [told]}, error=ValueError(told)
    )
    logging.getLogger("two").error("failed: %s", told, extra={"more": told})
    structlog.get_logger("one").error("broken", exc_info=raised(told))

    written = capsys.readouterr().err

    assert PASSWORD not in written
    assert SECRET not in written
    assert "***" in written
    assert form == "console" or all(json.loads(line) for line in written.splitlines())


def test_an_api_key_is_logged_by_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(service="gateway", form="json")
    key = new_key()
    structlog.get_logger("one").info(key)
    assert parse_key(key).key_id in capsys.readouterr().err
    structlog.get_logger("one").info(f"x-{key}.")
    assert key.rpartition(parse_key(key).key_id)[2] not in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8000/v1 by me@host",
        "tokens=5 key=stage-1",
        "?limit=5&after=7",
        "Bearer of news",
    ],
)
def test_what_is_no_secret_is_logged_as_it_is(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    log.configure(service="relay", form="json")
    structlog.get_logger("one").info(text)
    (line,) = lines(capsys)
    assert line["event"] == text


def test_the_arguments_of_a_task_are_not_formatted(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(service="relay", form="json")
    info = {"id": "7", "args": SECRET, "kwargs": {"prompt": SECRET}}
    logging.getLogger("celery.worker.strategy").error(
        "Couldn't convert ETA %r: %r. Task: %r", 1, ValueError(), info
    )
    envelope = {
        "body": SECRET,
        "headers": {"kwargsrepr": SECRET},
        "properties": {"delivery_tag": "8"},
    }
    logging.getLogger("kombu.transport.redis").critical("Could not restore message: %r", envelope)
    first, second = lines(capsys)
    assert SECRET not in str([first, second])
    assert "'id': '7'" in first["event"]
    assert "'delivery_tag': '8'" in second["event"]


def test_the_arguments_of_a_failed_task_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(service="relay", form="json")
    logging.getLogger("celery.app.trace").error(
        "Task %(name)s failed", {"name": "x"}, extra={"data": {"args": SECRET}}
    )

    (line,) = lines(capsys)

    assert (line["event"], "data" in line) == ("Task x failed", False)


def test_a_logged_exception_is_part_of_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(service="stage", form="json")
    try:
        int("x")
    except ValueError:
        structlog.get_logger("one").exception("broken", url="postgresql://me:secret@host/db")

    (line,) = lines(capsys)

    assert line["exception"][0]["exc_type"] == "ValueError"
    assert line["url"] == "postgresql://me:***@host/db"


def test_lines_below_the_level_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(service="stage", form="console", level="warning")
    structlog.get_logger("one").info("quiet")
    structlog.get_logger("one").error("loud")
    text = capsys.readouterr().err
    assert "quiet" not in text
    assert "loud" in text
