"""How tuning looks in a terminal, and the profile that it writes. Searches nothing."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shardline_fleet.settings_profile import profile_text
from shardline_fleet.simulator.fleet_file import FleetFile
from shardline_fleet.simulator.tuning.goal import TuningGoal
from shardline_fleet.simulator.tuning.space import Candidate, Setting
from shardline_fleet.simulator.tuning.tuner import Tried, Tuned

COLUMNS = ("tokens/s", "first p50", "first p99", "next p99", "request p99")
NUM_SHOWN = 5
"""Settings in the table, beside the default ones."""


def show(console: Console, tuned: Tuned, searched: list[Setting]) -> None:
    """Prints the default settings and the best ones that were tried; what was taken is green."""
    table = Table("", *searched, *COLUMNS, box=None, padding=(0, 2, 0, 0))
    shown = [each for each in tuned.tried[:NUM_SHOWN] if each is not tuned.default]
    shown += [tuned.best] if tuned.best not in (*shown, tuned.default) else []
    for name, tried in [("default", tuned.default), *((f"{place}.", each) for place, each in enumerate(shown, 1))]:
        color = "green" if tried is tuned.best else "default"
        settings = [_shown(tried.candidate[setting]) for setting in searched]
        table.add_row(*(f"[{color}]{text}[/]" for text in (name, *settings, *_figures(tried))))
    console.print(table)
    console.print(verdict(tuned))


def verdict(tuned: Tuned) -> str:
    """What the best settings are worth."""
    default, best = tuned.default.outcome, tuned.best.outcome
    assert default is not None
    assert best is not None
    if tuned.best is tuned.default:
        return "the default settings: nothing was better with other seeds too"
    if best.keeps_bounds and not default.keeps_bounds:
        return "they keep the bounds of the load, which the default settings break"
    return f"{tuned.gain:.2f} times as good as the default settings, with other seeds too"


def progress(number: int, tried: Tried) -> str:
    """A line for one trial."""
    settings = ", ".join(f"{setting} {_shown(value)}" for setting, value in tried.candidate.items())
    if tried.outcome is None:
        return f"{number}: {settings}: cannot run"
    figures = ", ".join(f"{name} {figure}" for name, figure in zip(COLUMNS, _figures(tried), strict=True))
    return f"{number}: {settings}: {figures}" + ("" if tried.cost is not None else "; jobs are left")


def tuned_profile(fleet: FleetFile, tuned: Tuned, goal: TuningGoal, file: str) -> str:
    """The text of the profile with the best settings, and where they come from."""
    comments = [
        f"By `shardline tune {file}` for {goal}, simulated: {verdict(tuned)}.",
        "SHARDLINE_PROFILE names this file to a stage and to `make up`; Docker Compose takes it with --env-file.",
    ]
    return profile_text(settings_of(fleet, tuned.best.candidate), comments)


def settings_of(fleet: FleetFile, candidate: Candidate) -> dict[str, object]:
    """Values by the names that stages and `make up` have for them; None: not said."""
    found: dict[str, object] = {setting.value: value for setting, value in candidate.items()}
    split = candidate[Setting.SPLIT]
    if split is not None:
        num_stages = str(split).count(",") + 1
        replicas = sum(fleet.cells[0].devices.values()) // num_stages
        found |= {"num_stages": num_stages, "stages": num_stages, "replicas": replicas}
    return found


def _figures(tried: Tried) -> tuple[str, ...]:
    outcome = tried.outcome
    assert outcome is not None
    return (
        f"{outcome.tokens_per_s:,.1f}",
        *map(_ms, (outcome.ttft_s.p50, outcome.ttft_s.p99, outcome.token_s.p99, outcome.request_s.p99)),
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
