"""An OTLP collector for tests: it takes spans over HTTP and keeps them. Also one that hangs until
it is told."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A span as it came."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    """Empty: it has none."""
    began_ns: int
    ended_ns: int
    attributes: dict[str, object]
    is_error: bool


@dataclass(slots=True)
class Collector:
    """Spans by their trace. Written by the server's threads."""

    url: str
    answers: threading.Event = field(default_factory=threading.Event)
    """Cleared: it takes requests and does not answer."""
    spans: list[Seen] = field(default_factory=list)

    def of_trace(self, trace: str) -> list[Seen]:
        """What came of it so far."""
        return [span for span in list(self.spans) if span.trace == trace]


@contextmanager
def collecting() -> Iterator[Collector]:
    """One that answers, on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            packed = self.headers.get("content-encoding") == "gzip"
            assert self.path == "/v1/traces"
            collector.answers.wait(60)
            collector.spans += _spans(gzip.decompress(body) if packed else body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    collector.answers.set()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.answers.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _spans(body: bytes) -> list[Seen]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        _seen(span, str(_attributes(resource.resource.attributes)["service.name"]))
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _seen(span: Span, service: str) -> Seen:
    return Seen(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, object]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, str(kind))
