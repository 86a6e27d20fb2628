"""Typed arguments: `submit` offers the fields of a request, and a type checker refuses any
other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_type_hints

import pytest
from mypy import api

from shardline.client import AsyncClient, Client, JobFields
from shardline.contract.job import JobRequest

NAMED = {"model", "prompt"}
"""Arguments of `submit` by themselves."""

# Third-party packages in Python, SQLAlchemy above all, are taken as untyped: that saves most of the
# time.
CONFIG = """
[mypy]
strict = true
python_version = 3.11
mypy_path = {shared}
follow_imports = skip
[mypy-shardline.*,msgspec.*]
follow_imports = normal
ignore_errors = true
"""

GOOD = """
from uuid import UUID
from shardline import AsyncClient, Client, JobRequest

def producer(client: Client, request: JobRequest) -> UUID:
    client.submit("m", "text", temperature=0, stop=["."], metadata={"a": 1})
    client.submit("m", messages=[{"role": "user", "content": "text"}])
    first = JobRequest(model="m", prompt="text", temperature=0)
    client.submit_many([first, {"model": "m", "prompt": "text"}])
    return client.submit(request.model, request.prompt, ALL_FIELDS)

async def task(client: AsyncClient) -> UUID:
    return await client.submit("m", "text", max_tokens=8)
"""

BAD = """
from shardline import AsyncClient, Client, JobRequest
from shardline import Clinet  # attr-defined

def producer(client: Client) -> None:
    client.submit("m", "text", temprature=0)  # call-arg
    client.submit("m", "text", temperature="hot")  # arg-type
    client.submit("m", "text", stop=".")  # arg-type
    JobRequest(model="m", prompt="text", temprature=0)  # call-arg

async def task(client: AsyncClient) -> None:
    await client.submit("m", "text", temprature=0)  # call-arg
"""
"""Each line with the code of the error that a type checker finds there."""


def errors_in(program: str, folder: Path) -> list[tuple[int, str]]:
    """Line and code of each error that mypy finds in a producer's program."""
    config = folder / "mypy.ini"
    source = folder / "producer.py"
    config.write_text(CONFIG.format(shared=Path(inspect.getfile(Client)).parents[2]))
    source.write_text(program)
    options = [
        "--config-file",
        str(config),
        "--cache-dir",
        str(folder),
        "--no-error-summary",
        "--hide-error-context",
    ]
    said, problem, _ = api.run([*options, str(source)])
    assert not problem, problem
    return [
        (int(line), code)
        for line, code in re.findall(r"producer\.py:(\d+): error: .*\[([a-z-]+)\]", said)
    ]


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_submit_offers_every_field_of_a_request(client: type[Client | AsyncClient]) -> None:
    offered = {*JobFields.__annotations__, *inspect.signature(client.submit).parameters}
    assert offered - {"self", "session", "fields"} == set(JobRequest.__struct_fields__)
    assert not NAMED & set(JobFields.__annotations__)
    assert get_type_hints(JobFields).keys() == JobFields.__optional_keys__


def test_a_type_checker_takes_good_arguments_and_names_each_bad_one(tmp_path: Path) -> None:
    fields = sorted(set(JobRequest.__struct_fields__) - NAMED)
    good = GOOD.replace("ALL_FIELDS", ", ".join(f"{name}=request.{name}" for name in fields))
    assert errors_in(good, tmp_path) == []

    numbered = enumerate(BAD.splitlines(), start=1)
    assert errors_in(BAD, tmp_path) == [
        (number, line.split("# ")[1]) for number, line in numbered if "# " in line
    ]
