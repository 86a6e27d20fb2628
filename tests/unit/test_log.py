"""Log lines: machines get one JSON object each, with the job's id and without passwords."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
import structlog
from celery.worker.consumer import consumer

from shardline import log

JOB = UUID(int=7)
SECRET = "nobody else may read this"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_each_json_line_of_a_job_carries_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(service="gateway", form="json")
    with log.job_context(JOB, attempt=2):
        structlog.get_logger("one").info("accepted", tokens=3)
    structlog.get_logger("one").warning("later")

    first, second = lines(capsys)

    assert (first["event"], first["job_id"], first["attempt"], first["tokens"]) == ("accepted", str(JOB), 2, 3)
    assert (first["service"], first["level"], first["logger"]) == ("gateway", "info", "one")
    assert "job_id" not in second


def test_the_lines_of_libraries_look_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(service="relay", form="json")
    logging.getLogger("kombu").info("too much")
    logging.getLogger("celery").warning("lost %s", "redis://:secret@host:6379/0")

    (line,) = lines(capsys)

    assert (line["event"], line["service"]) == ("lost redis://:***@host:6379/0", "relay")


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        (consumer.UNKNOWN_TASK_ERROR, (KeyError("shardline.sumbit"), SECRET, {"argsrepr": SECRET}, {})),
        (consumer.INVALID_TASK_ERROR, (ValueError(SECRET), SECRET)),
        (consumer.UNKNOWN_FORMAT, (SECRET,)),
        (consumer.MESSAGE_DECODE_ERROR, (ValueError(SECRET), "json", "utf-8", SECRET, SECRET)),
    ],
)
def test_the_content_of_a_message_that_celery_refuses_is_not_logged(
    capsys: pytest.CaptureFixture[str], template: str, arguments: tuple[object, ...]
) -> None:
    log.configure(service="relay", form="json")
    consumer.logger.error(template, *arguments, exc_info=ValueError(SECRET))

    (line,) = lines(capsys)

    assert SECRET not in str(line)
    assert line["event"].startswith(template.split(maxsplit=1)[0])


def test_the_arguments_of_a_failed_task_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(service="relay", form="json")
    logging.getLogger("celery.app.trace").error("Task %(name)s failed", {"name": "x"}, extra={"data": {"args": SECRET}})
    logging.getLogger(log.REFUSALS).error("consumer: Cannot connect to %s: %s.\n%s\n", "redis", "no route", "Again.")

    first, second = lines(capsys)

    assert (first["event"], "data" in first) == ("Task x failed", False)
    assert "no route" in second["event"]


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
