"""Requests of commands to a gateway, whatever the environment says of proxies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from shardline.cli.http_client import http_client


class ProxyHandler(BaseHTTPRequestHandler):
    """Answers with the whole address that it was asked for."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server that the environment names as a proxy of everything."""
    server = HTTPServer(("127.0.0.1", 0), ProxyHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_proxy_hears_of_requests_to_this_machine(port: int, host: str) -> None:
    with http_client(f"http://{host}:{port}/v1", timeout_s=5) as http:
        assert http.get("health").text == "/v1/health"


def test_a_proxy_hears_of_requests_to_other_machines(port: int) -> None:
    assert port
    with http_client("http://gateway.invalid/v1", timeout_s=5) as http:
        assert http.get("health").text == "http://gateway.invalid/v1/health"


@pytest.mark.parametrize(
    ("name", "value"), [("ALL_PROXY", "gopher://127.0.0.1"), ("SSL_CERT_FILE", "/nowhere.pem")]
)
def test_an_environment_that_cannot_be_used_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(httpx.TransportError, match="its environment cannot be used"):
        http_client("https://gateway.invalid", timeout_s=5)
