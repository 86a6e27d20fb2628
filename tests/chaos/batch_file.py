"""A large batch file through a whole stack, in calm and while every process is killed in turn: each
line must come out once, and the same.

    python -m tests.chaos.batch_file [--lines 5000] [--kill-every-s 5]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import psutil
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from services.standalone.settings import CLERK
from shardline.contract.api_key import bearer
from tests.meanwhile import meanwhile
from tests.stack import Stack, is_running

VICTIMS = ("stage-1", "gateway", "stage-0", "relay", "redis", "postgres")
MAX_CRASHES = 100
"""Innocent jobs outlive any number of kills."""
PATIENCE_S = 120.0
"""For a service that was killed."""
LOOK_S = 0.5
END_S = 3_600.0
COMPLETIONS = "/v1/completions"
BROKEN_EVERY = 10

Line = tuple[str | None, str]
"""The id of a line, and what became of it, as JSON."""


def lines(num: int) -> str:
    """A file in which every tenth line is broken, in one of five ways."""
    return "\n".join(_line(number) for number in range(num)) + "\n"


def _line(number: int) -> str:
    body: dict[str, Any] = {
        "model": "clerk",
        "prompt": f"sum: {number % 90} + {number // 90 % 90} =",
        "max_tokens": 12,
        "temperature": 0.8,
        "seed": number,
        "return_token_ids": True,
        "max_crashes": MAX_CRASHES,
    }
    line = {"custom_id": f"line-{number}", "method": "POST", "url": COMPLETIONS, "body": body}
    if number % BROKEN_EVERY:
        return json.dumps(line)
    broken = (
        "{",
        json.dumps({**line, "body": {**body, "max_tokens": "many"}}),
        json.dumps({**line, "body": {**body, "model": "nobody"}}),
        json.dumps({**line, "body": {**body, "temperature": 9}}),
        json.dumps({**line, "method": "GET"}),
    )
    return broken[number // BROKEN_EVERY % len(broken)]


class BatchCaller:
    """One who uses OpenAI's routes, and asks again what a killed service did not answer."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._pause = Event()
        self._retrying = Retrying(
            retry=retry_if_exception_type(httpx.HTTPError),
            wait=wait_fixed(LOOK_S),
            stop=stop_after_delay(PATIENCE_S),
            reraise=True,
        )

    def ask(self, method: str, route: str, **options: Any) -> httpx.Response:
        """Returns the answer. Raises httpx.HTTPError if there is none for too long."""
        return self._retrying(self._ask, method, route, **options)

    def run(self, content: str, name: str) -> dict[str, Any]:
        """Brings a file to its end. Returns the batch, and seconds until its first result and its
        end."""
        form = {"file": (f"{name}.jsonl", content.encode())}
        sent = self.ask("POST", "/v1/files", files=form, data={"purpose": "batch"}).json()
        asked = {
            "input_file_id": sent["id"],
            "endpoint": COMPLETIONS,
            "completion_window": "24h",
        }
        began_s = time.monotonic()
        # Under the key a repeat is the same batch.
        made = self.ask("POST", "/v1/batches", json=asked, headers={"Idempotency-Key": name})
        route = f"/v1/batches/{made.json()['id']}"
        first_s = None
        while time.monotonic() < began_s + END_S:
            batch = self.ask("GET", route).json()
            if first_s is None and batch["request_counts"]["completed"]:
                first_s = time.monotonic() - began_s
            if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                break
            self._pause.wait(LOOK_S)
        return {**batch, "first_s": first_s, "whole_s": time.monotonic() - began_s}

    def read(self, batch: Mapping[str, Any]) -> list[Line]:
        """Returns what became of each line, by its output and error files."""
        files = [batch[name] for name in ("output_file_id", "error_file_id") if batch[name]]
        content = [self.ask("GET", f"/v1/files/{file}/content").text for file in files]
        return [_outcome(json.loads(line)) for text in content for line in text.splitlines()]

    def _ask(self, method: str, route: str, **options: Any) -> httpx.Response:
        urls = self._stack.urls
        headers = {**bearer(urls["api_key"]), **options.pop("headers", {})}
        answer = httpx.request(
            method, f"{urls['gateway']}{route}", headers=headers, timeout=60, **options
        )
        answer.raise_for_status()
        return answer


def _outcome(line: Mapping[str, Any]) -> Line:
    """Without ids and times, which differ from batch to batch."""
    answer = line["response"]
    body = answer and answer["body"]
    told = {
        "error": line["error"],
        "status": answer and answer["status_code"],
        "refusal": body and body.get("error"),
        "choices": body and body.get("choices"),
        "usage": body and body.get("usage", {}).get("completion_tokens"),
    }
    return line["custom_id"], json.dumps(told, sort_keys=True)


@contextmanager
def kills(stack: Stack, every_s: float) -> Iterator[list[str]]:
    """Ends one process after another with SIGKILL. Yields the names of those killed so far."""
    killed: list[str] = []

    def kill(over: Event) -> None:
        names = cycle(VICTIMS)
        while not over.wait(every_s):
            name = next(names)
            pid = stack.look()["processes"].get(name)
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
                killed.append(name)

    with meanwhile(kill):
        yield killed


@contextmanager
def watched(stack: Stack) -> Iterator[list[float]]:
    """Yields MiB of the gateway's memory, looked at twice a second."""
    seen: list[float] = []

    def look(over: Event) -> None:
        while not over.wait(LOOK_S):
            try:
                process = psutil.Process(stack.look()["processes"]["gateway"])
                seen.append(process.memory_info().rss / 2**20)
            except psutil.NoSuchProcess:
                continue

    with meanwhile(look):
        yield seen


def measure(num: int, kill_every_s: float) -> dict[str, Any]:
    """Runs the file twice on one stack; returns the counts."""
    content = lines(num)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "SHARDLINE_MODEL": str(CLERK),
            "SHARDLINE_STAGES": "2",
            "SHARDLINE_KV_MIB": "64",
            "SHARDLINE_MAX_CRASHES": str(MAX_CRASHES),
        }
        stack = Stack(Path(folder), **settings)
        try:
            stack.start()
            caller = BatchCaller(stack)
            with watched(stack) as memory_mib:
                calm = caller.run(content, "calm")
            with kills(stack, kill_every_s) as killed:
                hurt = caller.run(content, "hurt")
            outcomes = [Counter(caller.read(batch)) for batch in (calm, hurt)]
        finally:
            stack.end()
    return {
        "lines": num,
        "statuses": [calm["status"], hurt["status"]],
        "counts": [calm["request_counts"], hurt["request_counts"]],
        "outcomes": [each.total() for each in outcomes],
        "same": (outcomes[0] & outcomes[1]).total(),
        "unlike": [name for name, _ in outcomes[0] - outcomes[1]][:20],
        "kills": dict(Counter(killed)),
        "first_s": round(calm["first_s"], 1),
        "whole_s": [round(calm["whole_s"], 1), round(hurt["whole_s"], 1)],
        "gateway_mib": [round(memory_mib[0]), round(max(memory_mib))],
    }


def main() -> int:
    """Prints the counts as one JSON line. Non-zero unless every line came out once, and the
    same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=5_000)
    parser.add_argument("--kill-every-s", type=float, default=5.0)
    options = parser.parse_args()
    found = measure(options.lines, options.kill_every_s)
    print(json.dumps(found))
    is_whole = found["outcomes"] == [options.lines] * 2
    return 0 if is_whole and found["same"] == options.lines else 1


if __name__ == "__main__":
    sys.exit(main())
