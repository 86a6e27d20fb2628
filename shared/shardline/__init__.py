"""Shardline: durable LLM inference over Celery, Redis and Postgres. This package is the client and
the contracts.

Owns the public names and imports each when it is first used, so that a service which needs one
module loads no other. Knows no service.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardline.base.errors import (
        Busy,
        Conflict,
        Diverged,
        Invalid,
        JobCancelled,
        JobEnded,
        JobExpired,
        JobFailed,
        NotFound,
        ShardlineError,
        Unavailable,
    )
    from shardline.client import AsyncClient, Client, JobFields
    from shardline.contract.chat import FunctionDefinition, Message, Tool, ToolCall
    from shardline.contract.decision import Choice, Decision, Level, Option, Predicate, Score
    from shardline.contract.job import (
        DEFAULT_PRIORITY,
        INTERACTIVE_PRIORITY,
        FinishReason,
        Job,
        JobRequest,
        JobState,
        JobSummary,
        PromptLogprob,
        Result,
        SamplingParams,
        TokenLogprob,
        Usage,
    )
    from shardline.contract.wire import Delta
    from shardline.store.dead_letters import Attempt, DeadLetter
    from shardline.store.listing import PageEnd

    __version__: str

__all__ = [
    "DEFAULT_PRIORITY",
    "INTERACTIVE_PRIORITY",
    "AsyncClient",
    "Attempt",
    "Busy",
    "Choice",
    "Client",
    "Conflict",
    "DeadLetter",
    "Decision",
    "Delta",
    "Diverged",
    "FinishReason",
    "FunctionDefinition",
    "Invalid",
    "Job",
    "JobCancelled",
    "JobEnded",
    "JobExpired",
    "JobFailed",
    "JobFields",
    "JobRequest",
    "JobState",
    "JobSummary",
    "Level",
    "Message",
    "NotFound",
    "Option",
    "PageEnd",
    "Predicate",
    "PromptLogprob",
    "Result",
    "SamplingParams",
    "Score",
    "ShardlineError",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "Unavailable",
    "Usage",
    "__version__",
]

_HOMES = (
    "base.errors",
    "contract.chat",
    "contract.decision",
    "contract.job",
    "contract.wire",
    "store.listing",
    "store.dead_letters",
    "client",
)
"""Modules that define the public names. The light ones come first: an error or a record loads no
driver."""


# Hidden from type checkers: a module that has it seems to have every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = _installed_version() if name == "__version__" else _find(name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _find(name: str) -> object:
    homes = (import_module(f"{__name__}.{home}") for home in _HOMES)
    return next(vars(home)[name] for home in homes if name in vars(home))


def _installed_version() -> object:
    """Returns what pyproject.toml has."""
    return import_module("importlib.metadata").version(__name__)
