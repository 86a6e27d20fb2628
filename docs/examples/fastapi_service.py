"""A FastAPI service: one client for all requests; answers come as they are generated.

`uvicorn --app-dir docs/examples fastapi_service:app` serves it; the program itself asks once.
"""

from contextlib import asynccontextmanager
from uuid import UUID

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

from shardline import AsyncClient


@asynccontextmanager
async def lifespan(app):
    async with AsyncClient() as client:
        app.state.shardline = client
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/words/{number}", status_code=202)
async def ask(number: int, request: Request):
    client = request.app.state.shardline
    return {"id": await client.submit("clerk", f"words: {number} =", temperature=0)}


@app.get("/words/{job_id}")
async def answer(job_id: UUID, request: Request):
    deltas = request.app.state.shardline.stream(job_id)
    return StreamingResponse((delta.text async for delta in deltas), media_type="text/plain")


if __name__ == "__main__":
    with TestClient(app) as browser:
        job_id = browser.post("/words/417").json()["id"]
        print(job_id, browser.get(f"/words/{job_id}").text)
