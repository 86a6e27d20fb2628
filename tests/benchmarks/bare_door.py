"""The least that a door on this stack can take: one route of Starlette that inserts a row, with
psycopg alone. What `doors` compares the gateway with.

python -m tests.benchmarks.bare_door DATABASE_URL PORT
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from uuid import uuid4

import psycopg
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.standalone.ports import free_port, is_taken
from tests.polling import until

TABLE = "CREATE TABLE IF NOT EXISTS bare_door (id uuid PRIMARY KEY, body jsonb NOT NULL)"
INSERT = "INSERT INTO bare_door VALUES (%s, %s)"


@contextmanager
def bare_door(database_url: str) -> Iterator[tuple[str, int]]:
    """A process that answers `POST /v1/jobs`: its address, and its id."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(TABLE)
    port = free_port()
    command = [sys.executable, "-m", "tests.benchmarks.bare_door", database_url, str(port)]
    with subprocess.Popen(command) as process:
        until(lambda: is_taken(port))
        yield f"http://127.0.0.1:{port}", process.pid
        process.terminate()


def main() -> None:
    """Serves until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("database_url")
    parser.add_argument("port", type=int)
    options = parser.parse_args()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        connect = psycopg.AsyncConnection.connect
        async with await connect(options.database_url, autocommit=True) as connection:
            app.state.connection = connection
            yield

    async def create(request: Request) -> Response:
        job_id = uuid4()
        body = (await request.body()).decode()
        await request.app.state.connection.execute(INSERT, (job_id, body))
        return JSONResponse({"id": str(job_id)}, status_code=202)

    route = Route("/v1/jobs", create, methods=["POST"])
    app = Starlette(routes=[route], lifespan=lifespan)
    uvicorn.run(app, port=options.port, log_config=None, access_log=False, server_header=False)


if __name__ == "__main__":
    main()
