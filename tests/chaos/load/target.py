"""What load, storm, judge and many faults need of a stack under test, whatever runs it. Knows no
particular stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shardline.base.config import Times
from tests.chaos.load.journal import Journal
from tests.chaos.load.workload import Workload
from tests.chaos.report.finding import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A process, as its own machine sees it."""

    pid: int
    rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultBackend:
    """Celery's, for results and for notes of other teams' workers. No fault takes what it holds."""

    url: str
    home: Path
    """For the logs of those workers."""


class Target(Protocol):
    """A stack that is ready, and what was asked of it."""

    @property
    def journal(self) -> Journal:
        """What was asked, promised and seen."""

    @property
    def workload(self) -> Workload:
        """What is asked of it."""

    @property
    def times(self) -> Times:
        """The protocol's times, as this stack has shrunk them."""

    @property
    def num_stages(self) -> int:
        """Of its pipeline; of a fleet as it is planned now."""

    @property
    def num_more_stages(self) -> int:
        """Of pipelines of other models, and workers of a fleet beside one pipeline."""

    @property
    def start_s(self) -> float:
        """How long it took to get ready."""

    @property
    def urls(self) -> Mapping[str, str]:
        """Where producers reach `gateway`, `database` and `redis`, and the `api_key` that the
        gateway wants."""

    @property
    def database_url(self) -> str:
        """For the harness itself: past everything that a fault may put in between."""

    @property
    def redis_url(self) -> str:
        """For the harness itself, likewise."""

    calm_s: float
    """How long it took for the whole set of requests, undisturbed."""

    @property
    def results(self) -> ResultBackend | None:
        """Where it stores results; None: nowhere."""

    @property
    def hears_webhooks(self) -> bool:
        """Whether its relays may reach a server of this machine."""

    def running(self) -> Mapping[str, Running]:
        """Our services' processes that live, by the service's name."""

    def end(self) -> list[Finding]:
        """Stop it. Returns what lives on though it should not (I5)."""

    def logs(self) -> Sequence[Path]:
        """What its processes wrote, after its end."""


@dataclass(kw_only=True)
class TargetRun:
    """What every target keeps of its run."""

    workload: Workload
    journal: Journal = field(default_factory=Journal)
    results: ResultBackend | None = None
    """Where it stores results of Celery's tasks, and of all jobs."""
    start_s: float = 0.0
    """How long the stack took to get ready."""
    calm_s: float = 0.0
    """How long it took for the whole set of requests, undisturbed."""
    hears_webhooks: bool = False
    """Whether its relays may reach a server of this machine."""
