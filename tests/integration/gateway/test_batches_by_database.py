"""`shardline run-batch` with Postgres alone: no gateway answers, and the lines are those that one
writes. Killed at any moment the same command goes on."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from shardline.base.errors import Invalid, NotFound
from shardline.cli.batches.batch_door import BatchState
from shardline.cli.batches.database_door import DatabaseDoor
from shardline.cli.database import asking
from shardline_server.tokenize import PreparedPrompt, Tokens
from tests.integration.gateway.running_gateway import running_gateway
from tests.integration.gateway.test_batches import CHAT, CHATS, line, names_in, num_lines, timeless
from tests.repository import REPOSITORY
from tests.tiny_head import TinyHead

NUM_LINES = 40
FAILED = 1
"""The command's exit status where lines failed."""

REOPEN = """
UPDATE batches SET status = 'in_progress', finalizing_at = NULL, completed_at = NULL,
    due_at = now()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFolder:
    """A file of lines, every tenth broken, and where the command writes."""

    path: Path
    database_url: str

    @property
    def source(self) -> Path:
        return self.path / "in.jsonl"

    @property
    def output(self) -> Path:
        return self.path / "out.jsonl"

    @property
    def note(self) -> Path:
        return self.path / "out.jsonl.upload"

    def write(self) -> None:
        lines = [
            line(f"{number}", {**CHAT, "temperature": 9 if number % 10 == 0 else 0})
            for number in range(NUM_LINES)
        ]
        self.source.write_text("\n".join(lines))

    def start(self, *names: str, **environment: str) -> subprocess.Popen[bytes]:
        """The command, or another module, with no server but this Postgres."""
        known = {name: value for name, value in os.environ.items() if "OPENAI" not in name}
        ours = {
            "SHARDLINE_DATABASE_URL": self.database_url,
            "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'shared'}",
        }
        files = ["run-batch", "-i", str(self.source), "-o", str(self.output)]
        command = names or ("shardline.cli", *files)
        return subprocess.Popen(
            [sys.executable, "-m", *command], env={**known, **ours, **environment}, cwd=self.path
        )

    async def run(self, **environment: str) -> list[Any]:
        """What the command has written, without what is each batch's own."""
        process = self.start(**environment)
        assert await asyncio.to_thread(process.wait, 120) == FAILED
        found = [json.loads(one) for one in self.output.read_text().splitlines()]
        return [
            (one["custom_id"], one["response"]["status_code"], timeless(one["response"]["body"]))
            for one in found
        ]


@pytest.fixture
def folder(tmp_path: Path, database_url: str) -> BatchFolder:
    folder = BatchFolder(path=tmp_path, database_url=database_url)
    folder.write()
    return folder


@asynccontextmanager
async def keeper(folder: BatchFolder, redis_url: str) -> AsyncIterator[None]:
    """`python -m services.gateway.batches`, which has no port; it ends when it is asked to."""
    process = folder.start("services.gateway.batches", SHARDLINE_REDIS_URL=redis_url)
    try:
        yield
    finally:
        process.terminate()
        status = await asyncio.to_thread(process.wait, 60)
    assert status == 0


async def killed_when(folder: BatchFolder, head: TinyHead, is_then: Callable[[], bool]) -> None:
    """The command, killed as soon as something is so."""
    process = folder.start()
    async with asyncio.timeout(120):
        while not is_then():
            assert process.poll() is None
            await asyncio.to_thread(head.wait_for_bell)
    process.kill()
    assert await asyncio.to_thread(process.wait) == -signal.SIGKILL


def counted(head: TinyHead, table: str) -> int:
    with head.database.connect() as connection:
        return int(connection.scalar(text(f"SELECT count(*) FROM {table}")) or 0)


def change(head: TinyHead, *statements: str) -> None:
    with head.database.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


@contextmanager
def door(folder: BatchFolder) -> Iterator[DatabaseDoor]:
    with asking(folder.database_url) as ask:
        yield DatabaseDoor(ask)


async def test_each_line_is_there_once_as_a_gateway_writes_it(
    folder: BatchFolder, redis_url: str, head: TinyHead
) -> None:
    async with running_gateway(folder.database_url, redis_url) as http:
        key = http.headers["authorization"].removeprefix("Bearer ")
        with head.serving():
            expected = await folder.run(OPENAI_BASE_URL=f"{http.base_url}/v1", OPENAI_API_KEY=key)
    assert len(expected) == NUM_LINES
    folder.output.unlink()
    assert counted(head, "jobs") == NUM_LINES * 9 // 10
    await killed_when(folder, head, lambda: counted(head, "batches") == 2)
    async with keeper(folder, redis_url):
        await killed_when(folder, head, lambda: num_lines(head) == 2 * NUM_LINES)
        assert names_in(folder.path) == ["in.jsonl", "out.jsonl.upload"]
        note = folder.note.read_bytes()
        with head.serving():
            assert await folder.run() == expected
        assert names_in(folder.path) == ["in.jsonl", "out.jsonl"]
        assert counted(head, "jobs") == 2 * NUM_LINES * 9 // 10
        assert counted(head, "batches") == 2
        written = folder.output.read_bytes()
        chunks = counted(head, "file_chunks")
        # As if the keeper had been killed while it wrote answers, and the command before its end
        behind = "DELETE FROM file_chunks WHERE number > 16"
        change(head, behind, f"{REOPEN} WHERE key_name IS NULL")
        folder.note.write_bytes(note)
        assert await folder.run() == expected
    assert (folder.output.read_bytes(), counted(head, "file_chunks")) == (written, chunks)


async def test_a_file_of_no_lines_for_a_batch_is_refused_by_its_reason(
    folder: BatchFolder, redis_url: str, head: TinyHead
) -> None:
    folder.source.write_text(f"{line('a', CHAT)}\n{line('a', CHAT)}")
    async with keeper(folder, redis_url):
        process = folder.start()
        assert await asyncio.to_thread(process.wait, 120) == 2
    assert names_in(folder.path) == ["in.jsonl"]
    assert counted(head, "jobs") == 0


async def test_a_batch_of_a_gateway_is_read_through_one(
    folder: BatchFolder, redis_url: str, head: TinyHead
) -> None:
    async with running_gateway(folder.database_url, redis_url) as http:
        content = {"file": ("in.jsonl", folder.source.read_bytes())}
        sent = await http.post("/v1/files", files=content, data={"purpose": "batch"})
        file_id = sent.json()["id"]
        body = {"input_file_id": file_id, "endpoint": CHATS, "completion_window": "24h"}
        headers = {"Idempotency-Key": f"run-batch-{file_id}"}
        theirs = (await http.post("/v1/batches", json=body, headers=headers)).json()
        with door(folder) as here, pytest.raises(Invalid, match="through a gateway"):
            here.begin(file_id, endpoint=CHATS, window="24h")
        # The other way round a gateway reads what rows began
        with door(folder) as here:
            mine = here.upload(folder.source)
            begun = here.begin(mine, endpoint=CHATS, window="1h")
        found = (await http.get(f"/v1/batches/{begun.id}")).json()
        assert (found["input_file_id"], found["completion_window"]) == (mine, "1h")
        assert found["id"] != theirs["id"]
        sent = await http.get(f"/v1/files/{mine}/content")
        assert sent.content == folder.source.read_bytes()


async def test_a_tokenizer_that_panics_fails_its_line_alone(
    folder: BatchFolder, redis_url: str, head: TinyHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As of a library in Rust, which is no Exception."""

    prepare = Tokens.prepare

    def panicking(self: Tokens, **request: Any) -> PreparedPrompt:
        if "panic" in str(request):
            raise Panic
        return prepare(self, **request)

    monkeypatch.setattr(Tokens, "prepare", panicking)
    bad = {**CHAT, "messages": [{"role": "user", "content": "panic"}]}
    folder.source.write_text(f"{line('a', bad)}\n{line('b', CHAT)}")
    async with running_gateway(folder.database_url, redis_url):
        with head.serving():
            found = await folder.run()
    assert [(custom_id, status) for custom_id, status, _ in found] == [("b", 200), ("a", 400)]


def test_answers_that_are_not_all_there_are_none(folder: BatchFolder, head: TinyHead) -> None:
    part = f"file-{hashlib.md5(b'', usedforsecurity=False).hexdigest()}"
    state = BatchState(
        id="batch_1",
        status="completed",
        num_lines=2,
        num_completed=1,
        num_failed=1,
        parts=(part,),
    )
    with door(folder) as here, pytest.raises(NotFound, match="0 answers of batch_1"):
        list(here.answers(state))
