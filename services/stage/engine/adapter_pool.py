"""The adapters in a stage's memory: loaded when a sequence opens with one, given up when others
need their place.

Decides nothing: the head's scheduler opens no more adapters at once than fit. Knows no job.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import NamedTuple

import msgspec
import structlog
from safetensors import SafetensorError

from services.stage.adapters.peft import ALIKE, AdapterFolder, refuse
from services.stage.engine.shard_runner import AdapterRows, Runner
from shardline.base.clock import monotonic_s
from shardline.base.errors import Invalid
from shardline_scheduler.step_plan import Open, StepPlan

log = structlog.get_logger(__name__)


class Use(NamedTuple):
    """Tells which adapter an open sequence uses."""

    name: str
    fingerprint: str
    refusal: str | None
    """Why it does not get it."""


class AdapterPool:
    """Adapters by fingerprint, the one used longest ago first. Used by the thread that runs
    steps."""

    def __init__(self, runner: Runner, folder: AdapterFolder, *, max_adapters: int) -> None:
        self._runner = runner
        self.folder = folder
        self._max_adapters = max_adapters
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._used_by: dict[int, Use] = {}
        """Open sequences, by number."""

    @property
    def num_loaded(self) -> int:
        """The number of adapters in memory."""
        return len(self._loaded)

    def admit(self, plan: StepPlan) -> StepPlan:
        """Loads the adapters of sequences that this plan opens; returns the plan, with those that
        cannot have theirs among its refused ones."""
        refused = [
            (opened.seq, reason)
            for opened in plan.opens
            if (reason := self._open(opened)) is not None
        ]
        return msgspec.structs.replace(plan, refused=(*plan.refused, *refused)) if refused else plan

    def close(self, seq: int) -> None:
        """A sequence is over; its adapter stays until another one needs the place."""
        self._used_by.pop(seq, None)

    def clear(self) -> None:
        """All sequences are over."""
        self._used_by.clear()

    def rows_of(self, plan: StepPlan) -> AdapterRows:
        """Returns the packed rows of each adapter in this step."""
        rows: dict[str, list[int]] = defaultdict(list)
        first = 0
        for row in plan.rows:
            if (use := self._used_by.get(row.seq)) is not None and use.refusal is None:
                rows[use.fingerprint] += range(first, first + row.length)
            first += row.length
        return tuple(rows.items())

    def _open(self, opened: Open) -> str | None:
        """Why it cannot have its adapter."""
        if not opened.adapter:
            return None
        name = opened.params.adapter or ""
        reason = self._refusal(name, opened.adapter)
        self._used_by[opened.seq] = Use(name, opened.adapter, reason)
        return reason

    def _refusal(self, name: str, fingerprint: str) -> str | None:
        """Loads it. Who is refused computes wrong KV, which others with the same adapter under this
        name would find: as long as it is open, they are refused too."""
        same = (
            use
            for use in self._used_by.values()
            if (use.name, use.fingerprint) == (name, fingerprint)
        )
        reasons = (use.refusal for use in same if use.refusal)
        if (reason := next(reasons, None)) is not None:
            return reason
        try:
            if fingerprint not in self._loaded:
                self._load(name, fingerprint)
        except Invalid as error:
            layers = self._runner.forward.shard.layers
            return f"layers {layers.start}-{layers.stop - 1}: {error.problem}. {error.remedy}"
        self._loaded.move_to_end(fingerprint)
        return None

    def _load(self, name: str, fingerprint: str) -> None:
        began_s = monotonic_s()
        adapter = self.folder.get(name)
        if adapter.fingerprint != fingerprint:
            refuse(name, "its files here are others than the head's", f"{ALIKE}, then submit again")
        self._make_room(name)
        try:
            loaded = self._runner.read_adapter(adapter)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch's for want of memory
            refuse(name, f"it cannot be read: {error}", "Submit again")
        if self.folder.get(name) != adapter:
            refuse(name, "its files were written while they were read", "Submit again")
        self._runner.keep_adapter(adapter, loaded)
        self._loaded[fingerprint] = None
        loaded_s = round(monotonic_s() - began_s, 4)
        log.info("adapter loaded", adapter=name, layers=len(loaded.layers), seconds=loaded_s)

    def _make_room(self, name: str) -> None:
        used = {use.fingerprint for use in self._used_by.values()}
        unused = [each for each in self._loaded if each not in used]
        for each in unused[: max(0, len(self._loaded) + 1 - self._max_adapters)]:
            del self._loaded[each]
            self._runner.drop_adapter(each)
        if len(self._loaded) >= self._max_adapters:
            problem = f"this stage holds {self._max_adapters} at once, and all are in use"
            refuse(name, problem, "Set SHARDLINE_ADAPTERS alike on all stages")
