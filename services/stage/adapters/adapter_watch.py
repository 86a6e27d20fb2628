"""The thread that looks through the folder of adapters, so that neither a claim nor a step waits
for a checksum."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import structlog

from services.stage.adapters.peft import AdapterFolder
from shardline.base.errors import Invalid, Unavailable

log = structlog.get_logger(__name__)

Tell = Callable[[Mapping[str, str]], None]
"""Gets the fingerprints of the adapters that fit the model, by name. May raise Unavailable: it is
called again then."""


class AdapterWatch(threading.Thread):
    """Adapters may come, change and go while the stage serves."""

    def __init__(
        self, folder: AdapterFolder, *, every_s: float, tell: Tell = lambda _: None
    ) -> None:
        super().__init__(name="adapter-watch", daemon=True)
        self._folder = folder
        self._every_s = every_s
        self._tell = tell
        self._told: Mapping[str, str] | None = None
        self._refused: dict[str, str] = {}
        self._stopped = threading.Event()

    def start(self) -> None:
        """Looks once before it returns: what is claimed from then on is claimed with fingerprints,
        so that it may be resumed as exact."""
        self.look()
        super().start()

    def run(self) -> None:
        """Watches until stopped."""
        while not self._stopped.wait(self._every_s):
            self.look()

    def stop(self) -> None:
        """Ends the thread. May be called from any thread."""
        self._stopped.set()

    def look(self) -> None:
        """Reads what has changed, and tells it."""
        found: dict[str, str] = {}
        refused: dict[str, str] = {}
        try:
            for name in self._folder.names():
                try:
                    found[name] = self._folder.get(name).fingerprint
                except Invalid as error:
                    refused[name] = f"{error.problem}. {error.remedy}"
                except Exception as error:  # noqa: BLE001 (must not hide the other adapters)
                    refused[name] = f"it cannot be read: {type(error).__name__}: {error}"
            if found != self._told:
                self._tell(found)
                self._told = found
        except (OSError, Unavailable) as error:
            log.warning("adapters cannot be listed", problem=str(error))
        for name in refused.keys() - {
            name for name, reason in self._refused.items() if refused.get(name) == reason
        }:
            log.warning("adapter refused", adapter=name, reason=refused[name])
        self._refused = refused
