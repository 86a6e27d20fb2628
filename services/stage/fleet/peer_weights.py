"""A model's folder, copied from another worker of the fleet: for hosts that have neither the folder
nor the hub.

`SHARDLINE_MODEL=peer:NAME` names a model that other workers serve. What is copied counts only if
its fingerprint is the one that Postgres has of that model. Knows no engine.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
from sqlalchemy import Engine as Database
from sqlalchemy.exc import DBAPIError

from services.stage.fleet.peer import Peer, connected
from services.stage.fleet.peer_server import FileSize
from services.stage.hop.sockets import SocketFactory
from services.stage.model.weights import fingerprint
from services.stage.settings import PEER, StageSettings
from shardline.base.clock import monotonic_s
from shardline.base.errors import Invalid, LinkLost, Unavailable
from shardline.store import fleets, models
from shardline.store.connection.database import unavailable

PATIENCE_S = 120.0
"""So long a worker waits for another one that has the model; then its supervisor starts it
again."""
LOOK_S = 1.0
PROGRESS_S = 5.0
FOLDER = "peers"
NAME = re.compile(r"[\w-][\w.-]*")
MIB = 1 << 20

log = structlog.get_logger(__name__)


def with_folders(
    settings: StageSettings, database: Database, sockets: SocketFactory
) -> StageSettings:
    """The same settings with a folder on this host in place of each `peer:NAME`. Raises Invalid,
    Unavailable."""
    if not settings.is_planned:
        raise Invalid(
            "SHARDLINE_MODEL",
            f"{PEER}NAME is for workers of a fleet",
            "Set SHARDLINE_LAYERS=planned",
        )
    found: dict[str, str] = {}
    for each in settings.every_model:
        path = each.model
        if path.startswith(PEER):
            copying = Copying(path.removeprefix(PEER), settings.cache_dir, database, sockets)
            path = str(copying.folder(PATIENCE_S * settings.time_scale))
        found[each.name] = path
    (name, model), *further = found.items()
    further_models = ",".join(f"{name}={path}" for name, path in further) or None
    return settings.model_copy(
        update={"model": model, "model_name": name, "further_models": further_models}
    )


@dataclass(frozen=True, slots=True)
class Copying:
    """One model, and where it is found and kept."""

    model: str
    cache_folder: Path
    database: Database
    sockets: SocketFactory

    def folder(self, patience_s: float) -> Path:
        """Returns the folder of the model: what was copied before, or now from a worker that has
        it.

        Raises Unavailable if none that has it is found within `patience_s`, or the disk has no
        room.
        """
        trusted, addresses = self._sources(patience_s)
        folder = self.cache_folder / FOLDER / trusted
        try:
            with _alone(folder.with_suffix(".lock")):
                if folder.is_dir() or any(
                    self._is_copied(address, trusted, folder) for address in addresses
                ):
                    return folder
        except OSError as error:
            raise Unavailable(
                f"the model {self.model!r} cannot be kept in {folder.parent}: {error}"
            ) from error
        raise Unavailable(
            f"none of {len(addresses)} workers gave all of the model {self.model!r}. "
            "It is tried again"
        )

    def _sources(self, patience_s: float) -> tuple[str, Sequence[str]]:
        """The fingerprint to trust, and the addresses of workers that have the model. Waits for
        both, unless a copy is there already."""
        end_s = monotonic_s() + patience_s
        has_told = False
        while True:
            try:
                with self.database.begin() as connection:
                    trusted = models.versions(connection).get(self.model)
                    addresses = fleets.holders(connection, self.model)
            except DBAPIError as error:
                raise unavailable(error) from error
            if trusted is not None and (
                addresses or (self.cache_folder / FOLDER / trusted).is_dir()
            ):
                return trusted, addresses
            if monotonic_s() > end_s:
                raise Unavailable(
                    f"no worker has the model {self.model!r}. "
                    "Start one with SHARDLINE_MODEL=FOLDER and SHARDLINE_LAYERS=planned, "
                    "or give this host the folder"
                )
            if not has_told:
                log.info("waits for a worker that has the model", model=self.model)
                has_told = True
            threading.Event().wait(LOOK_S)

    def _is_copied(self, address: str, trusted: str, folder: Path) -> bool:
        """Whether this worker gave all of it."""
        try:
            self._copy_all(address, trusted, folder)
        except LinkLost as error:
            log.warning("the model is not copied to its end from this worker", problem=str(error))
            return False
        return True

    def _copy_all(self, address: str, trusted: str, folder: Path) -> None:
        """A part of a file that is here already is not asked for again. Raises LinkLost,
        Unavailable."""
        draft = folder.with_suffix(".part")
        draft.mkdir(parents=True, exist_ok=True)
        with connected(self.sockets, address) as peer:
            files = peer.files(self.model)
            if not files or any(NAME.fullmatch(file.name) is None for file in files):
                raise LinkLost(f"{address} names files that no model has")
            self._check_room(draft, files)
            tell = _teller(address, sum(file.num_bytes for file in files))
            for file in files:
                self._copy(peer, file, draft / file.name, tell)
        problem = self._problem(draft, trusted)
        if problem is not None:
            shutil.rmtree(draft)
            raise LinkLost(f"{address} has other weights: {problem}")
        draft.rename(folder)
        log.info("model copied", model=self.model, folder=str(folder), source=address)

    def _problem(self, draft: Path, trusted: str) -> str | None:
        try:
            found = fingerprint(draft, self.cache_folder)
        except Invalid as error:
            return error.problem
        return None if found == trusted else f"fingerprint {found[:12]}, not {trusted[:12]}"

    def _copy(self, peer: Peer, file: FileSize, path: Path, tell: Callable[[int], None]) -> None:
        with path.open("ab") as out:
            if out.tell() > file.num_bytes:
                out.truncate(0)
                out.seek(0)
            start = out.tell()
            tell(start)
            for piece in peer.read(self.model, file.name, start, file.num_bytes):
                out.write(piece)
                tell(len(piece))

    def _check_room(self, draft: Path, files: Sequence[FileSize]) -> None:
        needed = sum(file.num_bytes for file in files) - sum(
            path.stat().st_size for path in draft.iterdir()
        )
        free = shutil.disk_usage(draft).free
        if needed > free:
            problem = (
                f"the model {self.model!r} needs {needed:,} bytes more in {draft.parent}, "
                f"where {free:,} are free"
            )
            raise Unavailable(f"{problem}. Make room, or set SHARDLINE_CACHE_DIR")


def _teller(address: str, num_bytes: int) -> Callable[[int], None]:
    """Counts bytes, and logs them now and then."""
    done = 0
    due_s = monotonic_s() + PROGRESS_S

    def tell(count: int) -> None:
        nonlocal done, due_s
        done += count
        if monotonic_s() >= due_s:
            due_s = monotonic_s() + PROGRESS_S
            log.info("copies the model", source=address, mib=done // MIB, of_mib=num_bytes // MIB)

    return tell


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A context that one worker of this host enters at a time: the others find what it has
    copied."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
