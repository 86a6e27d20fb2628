"""Over HTTP: OpenAI's API, or a job that outlives its caller. Accepted when the answer comes.

Usage: SHARDLINE_API_KEY=sk-shardline-… python http_gateway.py http://localhost:8000
"""

import json
import os
import sys

import httpx

key = {"Authorization": f"Bearer {os.environ['SHARDLINE_API_KEY']}"}
with httpx.Client(base_url=sys.argv[1], headers=key, timeout=60) as gateway:
    body = {"model": "clerk", "prompt": "date: 3 March 2021 =", "temperature": 0}
    completion = gateway.post("/v1/completions", json=body).raise_for_status().json()
    print(completion["id"].removeprefix("cmpl-"), completion["choices"][0]["text"])

    chat = {
        "model": "clerk",
        "messages": [{"role": "user", "content": "words: 417 ="}],
        "stream": True,
        "temperature": 0,
    }
    with gateway.stream("POST", "/v1/chat/completions", json=chat) as events:
        for line in events.iter_lines():
            if line.startswith("data: {"):
                print(
                    json.loads(line[6:])["choices"][0]["delta"].get("content", ""),
                    end="",
                    flush=True,
                )
    print()

    job = gateway.post("/v1/jobs", json=body).raise_for_status().json()
    with gateway.stream("GET", f"/v1/jobs/{job['id']}/events") as events:
        ended = [line for line in events.iter_lines() if line.startswith("data: {")][-1]
    print(job["id"], json.loads(ended[6:])["state"])
