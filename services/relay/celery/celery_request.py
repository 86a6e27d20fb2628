"""A message of the Celery door as a request: its arguments, its times, and what Celery embeds to
follow its end.

Owns what a positional value means and how Celery's options become fields. Knows no Postgres.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from celery import Celery
from celery.app.task import Context
from celery.canvas import Signature
from kombu.utils import json as kombu_json

from shardline.base.errors import Invalid
from shardline.contract.ids import DERIVED_VERSION, derived_id, former_id, parse_id
from shardline.contract.job import JobRequest
from shardline.contract.queues import SUBMIT_TASK
from shardline.contract.tenants.tenant_door import TenantDoor
from shardline.store.connection.encoding import storable, unstorable_alone
from shardline_server.store.celery_tasks import MAX_REQUEST_BYTES, CeleryTask

UNLOCK_TASK = "celery.chord_unlock"
MAX_TASK_ID = 256
MAX_TOLD = 80
"""Characters of a task's name in a refusal."""

ALREADY_EXPIRED_S = 0.001
"""The shortest deadline: such a job never begins."""

EMBEDDED = ("callbacks", "errbacks", "chain", "chord")
KEPT = (
    *(
        "id",
        "root_id",
        "parent_id",
        "group",
        "group_index",
        "reply_to",
        "correlation_id",
        "ignore_result",
    ),
    *("replaced_task_nesting", "stamped_headers", "stamps", *EMBEDDED),
)
"""Attributes of Celery's request that its end needs."""

HEADERS_OF_TENANT = frozenset(
    ("id", "task", "eta", "expires", "ignore_result", "argsrepr", "kwargsrepr")
)
"""Celery makes attributes of all headers, which overwrite its attributes and methods."""

REMEDY = (
    "Send a text, messages, token ids, a completion or a request's fields "
    "as the one positional value"
)


def job_id_of(task_id: str, door: TenantDoor | None = None) -> UUID:
    """The id of a task's job, unless the request names one: the task's own if that is a UUID,
    however it is written, and none that may follow from another's name."""
    own = _uuid(task_id)
    if own is not None and own.version != DERIVED_VERSION:
        return own
    return derived_id(task_id if door is None else f"{door.tasks} {task_id}")


def former_id_of(task_id: str) -> UUID | None:
    """The id that a relay of the release before gave the job; None if it is the same, or that relay
    could give none."""
    own = _uuid(task_id)
    if own is not None:
        return own if own.version == DERIVED_VERSION else None
    return None if unstorable_alone(task_id) else former_id(task_id)


def _uuid(task_id: str) -> UUID | None:
    try:
        return parse_id(task_id)
    except Invalid:
        return None


def task_key(task_id: object, door: TenantDoor | None = None) -> str:
    """Returns the id as a row can hold it. Two tenants with doors may use one id, so that theirs
    begin with the door's name."""
    own = storable(str(task_id)) or "-"
    if door is None:
        return own[:MAX_TASK_ID]
    key = f"{door.tasks}/{own}"
    return key if len(key) <= MAX_TASK_ID else f"{door.tasks}/{_digest(own)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def check_of_all(headers: object, payload: object) -> None:
    """Raises ValueError for another task than ours in the common queue. Celery's own, such as map
    and chunks, call ours without a message: without an id, and with nobody who hears its end."""
    named = headers if isinstance(headers, dict) and "task" in headers else payload
    name = named.get("task") if isinstance(named, dict) else None
    if name != SUBMIT_TASK:
        raise ValueError(f"{str(name)[:MAX_TOLD]!r} is no task {SUBMIT_TASK}")


def unlocked_body_id(headers: object, payload: Any) -> str | None:
    """Returns the id of the chord's body that Celery's own task waits to send; None for any other
    message. Celery puts that task into the body's queue where the backend counts no parts."""
    if not isinstance(headers, dict) or headers.get("task") != UNLOCK_TASK:
        return None
    try:
        return str(payload[0][1]["options"]["task_id"])
    except (LookupError, TypeError):
        return None


def check_of_tenant(headers: object, payload: object) -> None:
    """Raises ValueError for a message of a tenant's own queue with an id that no result can have,
    or that is more than a request: another task, such as those of Celery, which call others, a body
    with options that overwrite fields of the message, or a task that others follow: relays would
    send them, with their own rights, into any queue."""
    if not isinstance(headers, dict) or headers.get("task") != SUBMIT_TASK:
        raise ValueError(f"it is no task {SUBMIT_TASK}")
    task_id = headers["id"]
    if len(task_id) > MAX_TASK_ID or unstorable_alone(task_id):
        raise ValueError(f"its id is no text of at most {MAX_TASK_ID} characters that can be kept")
    if not isinstance(payload, list | tuple) or not set(payload[2] or ()) <= set(EMBEDDED):
        raise ValueError("its body has more than arguments")
    if linked := [name for name, value in (payload[2] or {}).items() if value]:
        raise ValueError(
            f"it has {linked[0]}, and a tenant's own queue takes single tasks: "
            "send what follows once the result is there"
        )


def headers_of_tenant(headers: Mapping[str, Any]) -> dict[str, Any]:
    """The headers of a message of a tenant's own queue that count."""
    return {name: headers[name] for name in HEADERS_OF_TENANT & headers.keys()}


def task_of_tenant(door: TenantDoor, task_id: object, ignore_result: object) -> CeleryTask:
    """What is kept of a message of a tenant's own queue: where its result goes. When it expires is
    not read yet."""
    kept = {"id": str(task_id), "ignore_result": bool(ignore_result), "door": door.tenant}
    return CeleryTask(task_id=task_key(task_id, door), request=_encode(kept))


def document_of(request: Context) -> object:
    """A JSON-like request for `parse_request`. Raises Invalid.

    Keyword arguments are fields, a positional value is what to complete, and Celery's options stand
    for the fields that are not given.
    """
    fields = dict(request.kwargs or {})
    document = {**_positional(request.args or (), fields), **fields}
    if request.eta is not None:
        document.setdefault("delay_s", max(0.0, _seconds_until(request.eta, "eta")))
    if request.expires is not None and _seconds_until(request.expires, "expires") <= 0:
        document["deadline_s"] = ALREADY_EXPIRED_S
    # Unset and 0 are one to Celery.
    if priority := (request.delivery_info or {}).get("priority"):
        document.setdefault("priority", priority)
    return document


def expires_s_of(request: Context) -> float | None:
    """Seconds until its job must have begun. Raises Invalid."""
    return None if request.expires is None else max(0.0, _seconds_until(request.expires, "expires"))


def task_of(app: Celery, request: Context) -> CeleryTask:
    """What is kept of a message until its job has ended. Raises Invalid for what cannot be kept."""
    kept = {name: value for name in KEPT if (value := getattr(request, name)) is not None}
    for name in ("callbacks", "errbacks", "chain"):
        if name in kept:
            kept[name] = [
                _named(app, one, name, request.id, place) for place, one in enumerate(kept[name])
            ]
    document = _encode(kept)
    if len(document) > MAX_REQUEST_BYTES:
        problem = f"what is linked to the task is longer than {MAX_REQUEST_BYTES} bytes of JSON"
        raise Invalid(
            "link", problem, "Pass on less: keep long arguments elsewhere and send where they are"
        )
    return CeleryTask(
        task_id=task_key(request.id), request=document, expires_s=expires_s_of(request)
    )


def check_without_backend(request: Context) -> None:
    """Raises Invalid for a chord's part where there is no result backend: its body would wait for
    ever."""
    if request.chord:
        remedy = "Set SHARDLINE_RESULT_BACKEND to the backend of the app that sends"
        raise Invalid(
            "chord", "its parts are counted in a result backend, and relays have none", remedy
        )


def bare_task_of(request: Context) -> CeleryTask:
    """Returns the task of a message with links that cannot be kept: where its result goes, and the
    chord that waits for it."""
    names = ["id", "reply_to", "correlation_id", "group", "group_index"]
    try:
        if len(_encode({"chord": request.chord})) <= MAX_REQUEST_BYTES // 2:
            names.append("chord")
    except Invalid:
        pass
    return CeleryTask(
        task_id=task_key(request.id),
        request=_encode({name: getattr(request, name) for name in names}),
    )


def _encode(kept: Mapping[str, object]) -> str:
    try:
        return str(kombu_json.dumps(kept))
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(
            "link", f"it is no JSON: {error}", "Link tasks with JSON arguments"
        ) from error


def _named(app: Celery, signature: Any, field: str, task_id: str, place: int) -> dict[str, Any]:
    """The signature with the ids that its messages will have, so that a second sending can be
    distinguished from the first."""
    try:
        found = Signature.from_dict(dict(signature), app=app)
        if found.get("subtask_type"):
            found.freeze()
        else:
            follower_id = str(derived_id(f"{task_id} {field} {place}"))
            found.options.setdefault("task_id", follower_id)
    except Exception as error:
        problem = f"number {place + 1} is no signature: {type(error).__name__}: {error}"
        raise Invalid(field, problem[:200], "Link Celery signatures") from error
    return dict(found)


def _seconds_until(moment: object, field: str) -> float:
    """Until one of Celery's ISO times, by this host's clock as at every Celery worker."""
    try:
        parsed = moment if isinstance(moment, datetime) else datetime.fromisoformat(str(moment))
    except ValueError as error:
        raise Invalid(
            field, f"{str(moment)[:64]!r} is no ISO 8601 time", "Let Celery write it"
        ) from error
    aware = parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)
    return (aware - datetime.now(UTC)).total_seconds()


def _positional(args: Sequence[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    if not args:
        return {}
    if len(args) > 1:
        raise Invalid("args", f"there are {len(args)} positional values", REMEDY)
    meant = next((fields_of(args[0]) for is_it, fields_of in FORMS if is_it(args[0])), None)
    if meant is None:
        raise Invalid(
            "args",
            f"nothing can be completed of the positional value, of type {_kind(args[0])}",
            REMEDY,
        )
    given = [name for name in ("prompt", "messages") if fields.get(name) is not None]
    if given and meant.keys() & {"prompt", "messages"}:
        problem = f"a positional value and {given[0]!r} both set the prompt"
        raise Invalid(
            "args",
            problem,
            "In a chain, leave the field out, or make the signature immutable: .si(…)",
        )
    return meant


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_completion(value: object) -> bool:
    """The value of a job of ours before it in the chain, or anything else that has a text."""
    return isinstance(value, dict) and isinstance(value.get("text"), str)


def _is_request(value: object) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and value.keys() <= set(JobRequest.__struct_fields__)
    )


def _all(is_it: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list | tuple) and bool(value) and all(map(is_it, value))


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return str(value if isinstance(value, str) else value["text"])


FORMS: tuple[tuple[Callable[[object], bool], Callable[[Any], dict[str, Any]]], ...] = (
    (_is_text, lambda value: {"prompt": value}),
    (_is_completion, lambda value: {"prompt": value["text"]}),
    (_is_request, dict),
    (_all(_is_message), lambda value: {"messages": value}),
    (_all(_is_token_id), lambda value: {"prompt": value}),
    # What the parts of a chord came to, as its body gets it.
    (
        _all(lambda one: _is_text(one) or _is_completion(one)),
        lambda value: {"prompt": "\n\n".join(map(_text, value))},
    ),
)
"""What a positional value may be, and the fields that it stands for."""
