"""Logs: one shape for our lines and for those of libraries, JSON for machines or colors for a
terminal.

Owns how a line looks; knows no service. `log_level` and `log_format` come from the settings.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from uuid import UUID

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

NOISY = (
    "httpx",
    "httpcore",
    "uvicorn.access",
    "kombu",
    "amqp",
    "celery.worker.strategy",
    "celery.pool",
)
"""Loggers that write something for each request or job; they are heard from WARNING on."""

SPAN_QUEUE = "opentelemetry.sdk._shared_internal"
"""Warns of each span that a full queue loses, at the pace of jobs; the exporter itself reports why
nothing leaves."""

CONTENT = ("args", "kwargs", "argsrepr", "kwargsrepr", "body", "headers")
HIDDEN = "***"
NAMES = r"[\w.-]*(?:token|key|passw(?:or)?d|pwd|secret|signature|credential|auth)[\w.-]*"
"""Names of an address's parameters with secret values."""

# None of them takes a quote or a backslash: a line of JSON stays one.
SECRETS = (
    (re.compile(r"(://[^\s:/@\"'\\]*):[^\s@\"'\\]+@"), rf"\1:{HIDDEN}@"),
    (re.compile(rf"([?&;]{NAMES}=)[^\s&;#\"'\\]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"(\b\w*password=)[^\s&;#\"'\\]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"(\bBearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"(\bAuthorization\W{1,6}Basic\s+)[\w+/=-]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"(sk-shardline-[0-9a-f]{1,16}-)[\w-]+"), rf"\1{HIDDEN}"),
)
"""Passwords in URLs and libpq's settings, keys in addresses and headers, and our API keys, but for
their ids."""


def configure(*, service: str, level: str = "INFO", form: str = "auto") -> None:
    """Send every log line of this process to standard error. `form` is json, console, or auto: by
    terminal."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_service(service),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(console=console),
                _hide_secrets,
            ],
        )
    )
    handler.addFilter(_without_bodies)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.getLogger(SPAN_QUEUE).setLevel(logging.ERROR)


def job_context(job_id: UUID | str, **fields: Any) -> AbstractContextManager[Any]:
    """Every line written inside carries `job_id` and `fields`."""
    return structlog.contextvars.bound_contextvars(job_id=str(job_id), **fields)


def hide_secrets(text: str) -> str:
    """A line, or any other text, without passwords and keys."""
    for pattern, replacement in SECRETS:
        text = pattern.sub(replacement, text)
    return text


def _without_bodies(record: logging.LogRecord) -> bool:
    """Removes what a task or a message holds from records of Celery and kombu."""
    if record.name.startswith(("celery.", "kombu.")):
        record.__dict__.pop("data", None)
        if isinstance(record.args, tuple):
            record.args = tuple(_without_content(value) for value in record.args)
        elif isinstance(record.args, Mapping):
            record.args = _without_content(record.args)
    return True


def _without_content(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: HIDDEN if name in CONTENT else part for name, part in value.items()}


def _renderers(*, console: bool) -> list[Processor]:
    if console:
        # Not rich's form, with locals, which hold prompts, and with lines that break in the middle
        # of a secret.
        plain = structlog.dev.plain_traceback
        return [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)
        ]
    return [
        # Without locals: they would put prompts and completions into the log.
        structlog.processors.ExceptionRenderer(
            structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        ),
        structlog.processors.JSONRenderer(default=str, ensure_ascii=False),
    ]


def _add_service(service: str) -> Processor:
    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    return add


def _hide_secrets(_logger: WrappedLogger, _method: str, line: Any) -> str:
    """The last word on a line, which is text by now: fields, messages and tracebacks are all in
    it."""
    return hide_secrets(line)
