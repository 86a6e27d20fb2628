"""The error tree, drawn once. Knows no service and no transport.

ShardlineError
├── Invalid            a request or a setting that can never succeed: field, limit and remedy
│   ├── UnknownModel
│   └── ContextExceeded
├── NotFound           no such job
├── Conflict           the id, the key or the name belongs to another request, or to another head
├── Diverged           a job went on with other tokens than a stream of it had given out
├── Overload           a door is full: try again later
├── JobEnded           the job ended without a completion (base of what a waiter sees)
│   ├── JobFailed
│   ├── JobCancelled
│   └── JobExpired
├── Unavailable        a server we depend on is unreachable: whether a COMMIT under way has happened
│   │                  is unknown
│   └── Busy           Postgres answered that it cannot do this now: nothing was stored
└── ProtocolError      a frame, a message or a peer that breaks the protocol
    └── LinkLost       a hop or control link is gone: new epoch
"""

from __future__ import annotations

import math
from collections.abc import Mapping


class ShardlineError(Exception):
    """Base of every error that Shardline raises on purpose."""


class Invalid(ShardlineError):
    """A request or setting that can never succeed as it stands.

    `field` names what is wrong, `problem` states it with the limit, `remedy` what to do.
    """

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}. {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy

    def as_dict(self) -> dict[str, str]:
        """The form stored in `jobs.error` and sent in HTTP error bodies."""
        return {
            "code": "invalid_request",
            "field": self.field,
            "problem": self.problem,
            "remedy": self.remedy,
        }


class UnknownModel(Invalid):
    """No stage has registered a model of this name."""

    def __init__(self, name: str, known: list[str]) -> None:
        names = ", ".join(sorted(known)) or "none yet"
        super().__init__("model", f"no model named {name!r} is registered", f"Use one of: {names}")


class ContextExceeded(Invalid):
    """Prompt and completion together are longer than the model's context, or than the KV of its
    pipelines.

    The words are OpenAI's: clients know an overflow by them, and go on with a shorter prompt.
    """

    def __init__(self, field: str, longest: int, problem: str, remedy: str) -> None:
        super().__init__(
            field, f"this model's maximum context length is {longest} tokens, and {problem}", remedy
        )


class LimitExceeded(Invalid):
    """A quota of the tenant or of the API key has no room for the request: nothing was stored.

    `retry_after_s`: when there may be room; None if never, as the request is larger than the limit.
    `left` has what there is of each limit by the minute: (limit, left).
    """

    def __init__(
        self,
        name: str,
        problem: str,
        *,
        retry_after_s: float | None,
        left: Mapping[str, tuple[int, int]],
    ) -> None:
        remedy = (
            "Ask for less, or for a higher limit"
            if retry_after_s is None
            else f"Send it again in {math.ceil(retry_after_s)} s"
        )
        super().__init__(name, problem, remedy)
        self.retry_after_s = retry_after_s
        self.left = left

    def as_dict(self) -> dict[str, str]:
        """Returns the form stored in `jobs.error`, with the code `limit_exceeded`."""
        return {**super().as_dict(), "code": "limit_exceeded"}


class NotFound(ShardlineError):
    """No job has this id."""


class Conflict(ShardlineError):
    """The id or idempotency key already belongs to a different request, a pipeline's name to
    another head."""


class Diverged(ShardlineError):
    """A reader was given tokens that no result will have: the job moved to hardware that is not
    exact to the last.

    Stream the job again from its beginning, or read its result.
    """

    def __init__(self, place: int) -> None:
        super().__init__(
            "the job was resumed on a pipeline of another exactness, "
            f"and its output differs from what was streamed, at or before token {place}. "
            "Stream it again from its beginning, or read its result"
        )


class Overload(ShardlineError):
    """A door is full. `retry_after_s`: when to come back."""

    def __init__(self, problem: str, retry_after_s: float) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


class JobEnded(ShardlineError):
    """The job ended without a completion."""


class JobFailed(JobEnded):
    """State `failed`; the message is the recorded reason."""


class JobCancelled(JobEnded):
    """State `cancelled`."""


class JobExpired(JobEnded):
    """State `expired`: the deadline passed."""


class Unavailable(ShardlineError):
    """Postgres, Redis or a stage cannot be reached now.

    `details` name hosts, users and limits: for logs and the caller's own process, not for
    strangers, who get `problem`.
    """

    def __init__(self, problem: object, details: str = "") -> None:
        super().__init__(f"{problem}: {details}" if details else str(problem))
        self.problem = str(problem)
        self.details = details


class Busy(Unavailable):
    """Postgres answers, but a lock, a time limit or its room stood in the way. Nothing was stored:
    try again."""


class ProtocolError(ShardlineError):
    """A peer sent what the protocol forbids; the link is dropped, the process lives."""


class LinkLost(ProtocolError):
    """A hop or control link closed, stalled or skipped a step; the head takes a new epoch."""
