"""llama.cpp's own server, asked over HTTP with token ids, one stream for each request. Runs in its
own environment."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.benchmarks.peers.runners.wire import Engine, Record, Settings, Work, serve

READY_S = 120.0
_IDLE = threading.Event()


class LlamaServer:
    """The server's process, and a thread for each request that runs."""

    def __init__(self, settings: Settings) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._argv = [*settings["argv"], "--host", "127.0.0.1", "--port", str(self._port)]
        self._process = subprocess.Popen(self._argv)
        began_s = time.perf_counter()
        while not self._is_ready():
            if self._process.poll() is not None or time.perf_counter() - began_s > READY_S:
                raise RuntimeError(f"llama-server did not start: status {self._process.poll()}")
            _IDLE.wait(0.1)

    def run(self, work: Work) -> Record:
        """See `Engine`."""
        record = Record(len(work.prompts))
        with ThreadPoolExecutor(max_workers=len(work.prompts)) as pool:
            for _ in pool.map(
                lambda index: self._ask(work, index, record), range(len(work.prompts))
            ):
                pass
        return record

    def close(self) -> None:
        """See `Engine`."""
        self._process.terminate()
        self._process.wait()

    def _ask(self, work: Work, index: int, record: Record) -> None:
        _IDLE.wait(max(0.0, work.arrivals_s[index] - record.now_s()))
        body = {
            "prompt": work.prompts[index],
            "n_predict": work.new_tokens,
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request(
            "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        for line in answer:
            if line.startswith(b"data: {"):
                said: dict[str, Any] = json.loads(line[6:])
                if not said.get("stop"):
                    record.add(index, said.get("tokens", []))
            elif line.startswith(b"error"):
                raise RuntimeError(line.decode())
        connection.close()

    def _is_ready(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port)
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False


def load(settings: Settings) -> tuple[Engine, dict[str, str]]:
    """The engine, and the versions that matter."""
    return LlamaServer(settings), settings["versions"]


if __name__ == "__main__":
    serve(load)
