"""The jobs of a load: when each comes and how long it is, drawn at random or read from a trace.
Knows no head."""

from __future__ import annotations

import csv
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shardline.base.errors import Invalid
from shardline_fleet.simulator.fleet_file import LoadFile, NotNegative, Scenario, TokenCount

FIELD = "load.trace"
COLUMNS = "a header at_s,prompt,output and a line for each job"
MAX_TRACED = 1_000_000
"""Jobs of a trace: more are minutes of reading, and hours of simulating."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One job, as it comes."""

    at_s: NotNegative
    prompt: TokenCount
    """Tokens."""
    output: TokenCount


class Arrivals:
    """The jobs of a whole fleet; `prompt` and `output` are their mean sizes."""

    def __init__(self, load: LoadFile, folder: Path) -> None:
        """A trace is relative to `folder`. Raises Invalid."""
        self._load = load
        self._trace: list[Arrival] = []
        self.prompt = load.prompt
        self.output = load.output
        self.max_len = 2 * (load.prompt + load.output)
        """No job has as many tokens."""
        if load.trace is not None:
            self._trace = read_trace(folder / load.trace)
            self.prompt = round(statistics.mean(each.prompt for each in self._trace))
            self.output = round(statistics.mean(each.output for each in self._trace))
            self.max_len = 1 + max(each.prompt + each.output for each in self._trace)

    def of_share(self, share: float, source: random.Random) -> Iterator[Arrival]:
        """Yields the jobs of a share of the fleet."""
        load = self._load
        if load.scenario is Scenario.TRACE:
            yield from (each for each in self._trace if share == 1 or source.random() < share)
        elif load.scenario is Scenario.OFFLINE:
            for _ in range(max(1, round(load.jobs * share))):
                yield self._drawn(0.0, source)
        else:
            at_s = source.expovariate(load.rate * share)
            while at_s < load.seconds:
                yield self._drawn(at_s, source)
                at_s += source.expovariate(load.rate * share)

    def _drawn(self, at_s: float, source: random.Random) -> Arrival:
        return Arrival(
            at_s=at_s,
            prompt=self._size(self.prompt, source),
            output=self._size(self.output, source),
        )

    def _size(self, mean: int, source: random.Random) -> int:
        spread = round(self._load.spread * mean)
        return max(1, source.randint(mean - spread, mean + spread))


def read_trace(path: Path) -> list[Arrival]:
    """Reads a trace in CSV; the first job comes at 0 s, whenever it came. Raises Invalid, naming
    the line."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            found = sorted(_arrivals(csv.DictReader(file)), key=lambda each: each.at_s)
    except OSError as error:
        raise Invalid(
            FIELD, f"{path} cannot be read: {error.strerror}", "Check the path"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise Invalid(FIELD, f"{path} is no CSV: {error}", f"It needs {COLUMNS}") from error
    if not 1 <= len(found) <= MAX_TRACED:
        raise Invalid(
            FIELD, f"{path} has {len(found):,} jobs; 1 to {MAX_TRACED:,}", f"It needs {COLUMNS}"
        )
    first_s = found[0].at_s
    return [msgspec.structs.replace(each, at_s=each.at_s - first_s) for each in found]


def _arrivals(rows: csv.DictReader[str]) -> Iterator[Arrival]:
    for row in rows:
        try:
            yield msgspec.convert(
                {name: value for name, value in row.items() if name}, Arrival, strict=False
            )
        except msgspec.ValidationError as error:
            raise Invalid(FIELD, f"line {rows.line_num}: {error}", f"It needs {COLUMNS}") from error
