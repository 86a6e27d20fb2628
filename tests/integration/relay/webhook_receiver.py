"""A server of HTTP that receives webhooks as their consumers do: what came, and answers as a test
wants them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from openai import OpenAI

from tests.polling import until


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """One request."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    def unwrap(self, secret: str) -> Any:
        """As OpenAI's own client reads it. Raises what it raises for a wrong signature."""
        client = OpenAI(api_key="none", base_url="http://127.0.0.1:1", webhook_secret=secret)
        return client.webhooks.unwrap(self.body, self.headers)


@dataclass(slots=True, kw_only=True)
class WebhookReceiver:
    """Answers 200, or what `answers` has for a path: a status, which may come late, and headers."""

    url: str
    taken: list[Webhook] = field(default_factory=list)
    answers: dict[str, Callable[[], tuple[int, Mapping[str, str]]]] = field(default_factory=dict)

    def at(self, path: str) -> list[Webhook]:
        """Those that came there, in order."""
        return [one for one in self.taken if one.path == path]

    def wait_for(self, path: str, num: int) -> list[Webhook]:
        """The first ones there, once so many have come."""
        until(lambda: len(self.at(path)) >= num)
        return self.at(path)[:num]


@contextmanager
def webhook_receiver() -> Iterator[WebhookReceiver]:
    """A receiver on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            receiver.taken.append(Webhook(path=self.path, headers=headers, body=body))
            status, given = receiver.answers.get(self.path, lambda: (200, {}))()
            self.send_response(status)
            for name, value in given.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver = WebhookReceiver(url=f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
