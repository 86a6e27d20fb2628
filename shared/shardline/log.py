"""Logs: one shape for our lines and for those of libraries, JSON for machines or colors for a terminal.

Owns how a line looks; knows no service. `log_level` and `log_format` come from the settings.
"""

from __future__ import annotations

import logging
import re
import sys
from contextlib import AbstractContextManager
from typing import Any
from uuid import UUID

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

NOISY = ("httpx", "httpcore", "uvicorn.access", "kombu", "amqp", "celery.worker.strategy")
"""Loggers that say something for each request or job; they are heard from WARNING on."""

REFUSALS = "celery.worker.consumer.consumer"
"""Logger of Celery that writes a message whole when it refuses it: a misspelled task's prompt does not belong there."""

REFUSED = ("Received", "Can't decode message body")
MAX_TOLD = 200
PASSWORD_IN_URL = re.compile(r"(?P<scheme>[a-z0-9+]+://[^:/@\s]*):[^@/\s]+@", re.IGNORECASE)


def configure(*, service: str, level: str = "INFO", form: str = "auto") -> None:
    """Send every log line of this process to standard error. `form` is json, console, or auto: by terminal."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_service(service),
        _hide_passwords,
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
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(console=console)],
        )
    )
    handler.addFilter(_without_bodies)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def job_context(job_id: UUID | str, **fields: Any) -> AbstractContextManager[Any]:
    """Every line written inside carries `job_id` and `fields`."""
    return structlog.contextvars.bound_contextvars(job_id=str(job_id), **fields)


def hide_password(text: str) -> str:
    """A URL, or text with URLs in it, without passwords."""
    return PASSWORD_IN_URL.sub(r"\g<scheme>:***@", text)


def _without_bodies(record: logging.LogRecord) -> bool:
    """Of what Celery says about a message: the first line, without the message. Its type is all that may be told."""
    if record.name.startswith("celery."):
        record.__dict__.pop("data", None)  # The task's arguments, in an `extra`.
    text = str(record.msg).lstrip()
    if record.name == REFUSALS and text.startswith(REFUSED):
        problem = text.partition("\n")[0].partition("%")[0].strip(" :[")
        told = record.args[0] if isinstance(record.args, tuple) and record.args else None
        record.msg = f"{problem}: {str(told)[:MAX_TOLD]}" if isinstance(told, KeyError) else problem
        record.args, record.exc_info, record.exc_text = (), None, None
    return True


def _renderers(*, console: bool) -> list[Processor]:
    if console:
        return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    return [
        # Without locals: they would put prompts and completions into the log.
        structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
        structlog.processors.JSONRenderer(default=str, ensure_ascii=False),
    ]


def _add_service(service: str) -> Processor:
    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    return add


def _hide_passwords(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for name, value in event.items():
        if isinstance(value, str) and "://" in value:
            event[name] = hide_password(value)
    return event
