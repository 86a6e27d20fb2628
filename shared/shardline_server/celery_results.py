"""Celery's result backend: what the end of a job is called there, and an app that waits for it
within bounds. Imports Celery, so only workers import it.

Celery's own worker would store results in the thread that serves its queue; ours store them in
separate threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery import Celery
from celery.exceptions import TaskRevokedError
from sqlalchemy import make_url

from shardline.base.config import Settings
from shardline.base.errors import JobFailed
from shardline.contract.job import JobState
from shardline.contract.queues import celery_settings

TIMEOUT_S = 2.0
"""For each connection and answer. Longer waits do not help: a loop that stores a result tries
again, or gives up."""

OPTIONS = "result_backend_transport_options"


def results_app(settings: Settings, name: str, **options: Any) -> Celery:
    """An app that never runs a worker: to send and to store results. A dead backend is an error
    soon. `options` replace settings of Celery."""
    app = Celery(name, set_as_current=False)
    shared = celery_settings(settings)
    limits = backend_limits(settings.result_backend)
    limits[OPTIONS] |= shared.get(OPTIONS, {})
    app.conf.update(shared | limits | options)
    return app


def backend_limits(url: str | None) -> dict[str, Any]:
    """Celery's settings that bound each wait for the backend of this URL, where its driver has
    such a bound."""
    limits: dict[str, Any] = {
        "redis_socket_timeout": TIMEOUT_S,
        "redis_socket_connect_timeout": TIMEOUT_S,
        "redis_retry_on_timeout": False,
        OPTIONS: {"retry_policy": {"max_retries": 0}},
    }
    if url and url.startswith("db+"):
        backend = make_url(url.removeprefix("db+")).get_backend_name()
        arguments = {
            "postgresql": {"connect_timeout": int(TIMEOUT_S)},
            "sqlite": {"timeout": TIMEOUT_S},
        }
        limits["database_engine_options"] = {"connect_args": arguments.get(backend, {})}
    return limits


def keeps_results(settings: Settings) -> bool:
    """Whether the backend keeps a result for callers that ask by its id.

    RPC sends it to one producer instead, whom only the task's message names.
    """
    return settings.result_backend is not None and not settings.result_backend.startswith("rpc")


def completion(
    *,
    job_id: str,
    text: str,
    token_ids: Sequence[int],
    finish_reason: str,
    num_prompt: int,
    **further: Any,
) -> dict[str, Any]:
    """What `AsyncResult.get()` returns, and the next task of a chain gets. `further` is JSON: the
    decision of a question, the reasoning and calls of a chat, a vector or a score; what is empty is
    left out."""
    value: dict[str, Any] = {
        "id": job_id,
        "text": text,
        "token_ids": list(token_ids),
        "finish_reason": finish_reason,
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": len(token_ids)},
    }
    return value | {name: each for name, each in further.items() if each or each == 0}


def error_of(state: JobState, reason: str) -> Exception:
    """What `AsyncResult.get()` raises for a job that ended without success."""
    return JobFailed(reason) if state is JobState.FAILED else TaskRevokedError(str(state))


def failure_text(error: Mapping[str, Any] | None) -> str:
    """The recorded reason of a failure, in words."""
    if not error:
        return "see the job's row"
    problem = str(error.get("problem", "see the job's row"))
    remedy = error.get("remedy")
    if "field" in error:
        problem = f"{error['field']}: {problem}"
    return f"{problem}. {remedy}" if remedy else problem


def store_end(app: Celery, job_id: str, state: JobState, value: Any) -> None:
    """Store how a job ended under its own id: `value` is the completion, or the reason of a
    failure. May raise anything that the backend's driver does."""
    if state is JobState.SUCCEEDED:
        app.backend.store_result(job_id, value, "SUCCESS")
    else:
        celery_state = "FAILURE" if state is JobState.FAILED else "REVOKED"
        app.backend.store_result(job_id, error_of(state, str(value)), celery_state)
