"""Files, by OpenAI's own client and by hand: as they were sent, listed, gone; what breaks off
leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from sqlalchemy import text

from services.gateway.files.upload_form import UploadForm
from tests.integration.gateway.running_gateway import running_gateway
from tests.tiny_head import TinyHead

ROUTE = "/v1/files"
MIB = 1 << 20
HEAD = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n'
FORM = {"Content-Type": "multipart/form-data; boundary=b"}
LIMITS = {"http_max_file_bytes": 3 * MIB, "http_max_stored_bytes": 5 * MIB}


@pytest.fixture
async def http(
    database_url: str, redis_url: str, head: TinyHead
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that takes small files."""
    async with running_gateway(database_url, redis_url, **LIMITS) as http:
        yield http


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    key = http.headers["authorization"].removeprefix("Bearer ")
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1/", api_key=key, max_retries=0) as client:
        yield client


def num_rows(head: TinyHead) -> tuple[int, int]:
    """Of files, whole or not, and of their chunks."""
    with head.database.connect() as connection:
        counts = [
            connection.scalar(text(f"SELECT count(*) FROM {table}"))
            for table in ("files", "file_chunks")
        ]
    return counts[0] or 0, counts[1] or 0


async def test_a_file_is_what_was_sent_until_it_is_deleted(
    client: AsyncOpenAI, http: httpx.AsyncClient, head: TinyHead
) -> None:
    # Over a chunk, with what could end a form and bytes that no text has.
    content = bytes(range(256)) * 6_000 + b"\r\n--\r\n\n" * 9
    first = await client.files.create(
        file=("dir/first.jsonl", content),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (first.bytes, first.filename, first.purpose) == (len(content), "first.jsonl", "batch")
    assert first.expires_at == first.created_at + 3600
    empty = await client.files.create(file=("leer für 1.jsonl", b""), purpose="batch")
    assert (empty.bytes, empty.expires_at) == (0, None)
    assert await client.files.retrieve(first.id) == first
    found = [await client.files.content(one.id) for one in (first, empty)]
    assert [one.content for one in found] == [content, b""]
    assert [one.response.headers["content-disposition"] for one in found] == [
        'attachment; filename="first.jsonl"',
        "attachment; filename=\"leer f_r 1.jsonl\"; filename*=utf-8''leer%20f%C3%BCr%201.jsonl",
    ]
    # In pages, both ways, and by purpose
    assert [one.id async for one in client.files.list(limit=1)] == [empty.id, first.id]
    assert [one.id async for one in client.files.list(limit=1, order="asc")] == [first.id, empty.id]
    assert [one async for one in client.files.list(purpose="vision")] == []
    # What has expired is not there any more, and what is deleted neither
    with head.database.begin() as connection:
        connection.execute(text("UPDATE files SET expires_at = now() WHERE bytes > 0"))
    for name in (first.id, "file-00000000-0000-0000-0000-000000000000"):
        with pytest.raises(openai.NotFoundError):
            await client.files.content(name)
    assert (await client.files.delete(empty.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.delete(empty.id)
    assert [one async for one in client.files.list()] == []
    assert (await http.get(ROUTE, params={"after": empty.id})).status_code == 400


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (b"", "body"),
        (b"--c\r\n", "body"),
        (HEAD % b"file" + b"x", "body"),
        (b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n", "body"),
        (
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n',
            "file",
        ),
        (b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n', "purpose"),
        (b"--b\r\nA: " + b"x" * 5_000 + b"\r\n\r\nx\r\n--b--\r\n", "body"),
        (b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"x" * 2_000, "a"),
        (
            b"".join(
                b'--b\r\nContent-Disposition: form-data; name="%d"\r\n\r\n\r\n' % n
                for n in range(9)
            ),
            "body",
        ),
    ],
)
async def test_a_form_that_is_none_is_refused_and_leaves_nothing(
    http: httpx.AsyncClient, head: TinyHead, form: bytes, field: str
) -> None:
    reply = await http.post(ROUTE, content=form, headers=FORM)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text
    assert num_rows(head) == (0, 0)


async def test_files_are_bounded_each_and_together_and_broken_ones_leave_nothing(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    async def send(num_bytes: int, purpose: str = "batch") -> tuple[int, str | None]:
        content = {"file": ("a", b"x" * num_bytes)}
        reply = await http.post(ROUTE, files=content, data={"purpose": purpose})
        return reply.status_code, reply.json().get("error", {}).get("param")

    assert await send(3 * MIB + 1) == (413, "file")
    assert await send(9, purpose="vision") == (400, "purpose")
    assert num_rows(head) == (0, 0)
    assert await send(3 * MIB) == (200, None)
    assert await send(2 * MIB + 1) == (400, "file")
    assert await send(2 * MIB) == (200, None)
    assert await send(1) == (400, "file")
    assert num_rows(head) == (2, 5)
    # A caller who leaves in the middle
    reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
    lines = [
        f"POST {ROUTE} HTTP/1.1",
        "Host: localhost",
        f"Authorization: {http.headers['authorization']}",
        f"Content-Type: {FORM['Content-Type']}",
        "Content-Length: 2000000",
    ]
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    writer.write("\r\n".join([*lines, "", ""]).encode() + part)
    await writer.drain()
    async with asyncio.timeout(30):
        while num_rows(head)[0] == 2:
            await asyncio.to_thread(head.wait_for_bell)
        writer.close()
        while num_rows(head)[0] == 3:
            await asyncio.to_thread(head.wait_for_bell)
    assert num_rows(head) == (2, 5)
    assert not await reader.read()


def test_a_name_may_come_in_the_form_of_rfc_5987() -> None:
    read = UploadForm(b"b")
    encoded = b"filename=\"=?utf-8?B?w6k=?=\"; filename*=utf-8''%C3%A9%3B.jsonl"
    read.push(b'--b\r\nContent-Disposition: form-data; name="file"; ' + encoded + b"\r\n\r\n{}")
    assert read.filename == "\N{LATIN SMALL LETTER E WITH ACUTE};.jsonl"


def test_a_form_is_the_same_however_it_is_cut() -> None:
    content = b"{}\r\n--c\r\n\r\n--\r\n-" * 3
    form = (
        HEAD % b"purpose"
        + b'batch\r\n--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n'
        + b"Content-Type: text/plain\r\n\r\n"
        + content
        + b"\r\n--b--\r\n"
    )
    found = set()
    for size in (1, 2, 3, 7, 50, len(form)):
        read = UploadForm(b"b")
        for start in range(0, len(form), size):
            read.push(form[start : start + size])
        found.add((bytes(read.content), read.filename, *read.fields.items(), read.is_whole))
    assert found == {(content, "x", ("purpose", "batch"), True)}
