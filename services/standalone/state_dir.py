"""The runtime folder: one stack at a time in it, which processes it runs, and up.json for everyone
else.

Every started process is recorded with its start time before anything depends on it. A pid alone
proves nothing: it may belong to a stranger by now, so nothing is signaled unless pid and start time
agree.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Any, Self

import msgspec
import psutil

from services.standalone.processes import is_alive, wait_until_gone
from shardline.base.errors import Invalid
from shardline.contract.api_key import new_key
from shardline_server.host.lock_file import try_lock

SUPERVISOR = "supervisor"
TARGETS_FILE = "prometheus.json"
"""For `file_sd_configs`: the metrics of each process."""
HOP_KEY_FILE = "hop_secret_key"
LEFTOVER_GRACE_S = 5.0


class AlreadyUp(RuntimeError):
    """Another supervisor runs a stack in this folder."""


class RecordedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process, identified by its pid and its start (seconds since 1970, as the system reports
    it)."""

    pid: int
    started_at: float

    @classmethod
    def of(cls, pid: int) -> RecordedProcess:
        """The process that has this pid now; one that is already gone gets no time and is never
        signaled."""
        try:
            return cls(pid=pid, started_at=psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            return cls(pid=pid, started_at=0.0)

    def find(self) -> psutil.Process | None:
        """The live process, or None when it is gone or the pid has a new owner."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started_at) < 0.01
        except psutil.NoSuchProcess:
            return None
        return process if same and is_alive(process) else None


_PIDS = msgspec.json.Decoder(dict[str, RecordedProcess])
_DOCUMENT = msgspec.json.Decoder(dict[str, Any])


class StateDir:
    """A stack's runtime folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().resolve()
        self.up_file = self.folder / "up.json"
        self._targets_file = self.folder / TARGETS_FILE
        self._key_file = self.folder / "api_key"
        self._pids_file = self.folder / "pids.json"
        self._lock_file = self.folder / "up.lock"

    def lock(self) -> StateDirLock:
        """Own the folder for a `with` block. Raises AlreadyUp."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return StateDirLock(self._lock_file)

    def api_key(self) -> str:
        """This stack's own key for its gateway: made once, the same after each start."""
        if not self._key_file.exists():
            write_private(self._key_file, new_key().encode())
        return self._key_file.read_text(encoding="utf-8").strip()

    def make_hop_key(self) -> None:
        """Make the key of this stack's hops over tcp, in HOP_KEY_FILE, unless it exists."""
        path = self.folder / HOP_KEY_FILE
        if not path.exists():
            write_private(path, secrets.token_hex(32).encode())

    def record(self, pids: dict[str, int]) -> None:
        """Remember these processes, so that `down` finds them whatever happens to the
        supervisor."""
        try:
            known = self.recorded()
        except Invalid:
            known = {}  # What runs now is all in `pids`.
        entries = {
            name: known[name]
            if name in known and known[name].pid == pid
            else RecordedProcess.of(pid)
            for name, pid in pids.items()
        }
        write_private(self._pids_file, msgspec.json.encode(entries))

    def recorded(self) -> dict[str, RecordedProcess]:
        """The processes that were recorded last, dead or alive. Raises Invalid for a damaged
        record."""
        if not self._pids_file.exists():
            return {}
        try:
            return _PIDS.decode(self._pids_file.read_bytes())
        except ValueError as error:
            problem = "it is damaged, so processes of a stack may still run unseen"
            shown = f"`pgrep -af services.` and `pgrep -af {quote(str(self.folder))}` show"
            remedy = f"End those of this folder that {shown}, then delete it"
            raise Invalid(str(self._pids_file), problem, remedy) from error

    def alive(self) -> dict[str, psutil.Process]:
        """The recorded processes that still run."""
        found = {name: entry.find() for name, entry in self.recorded().items()}
        return {name: process for name, process in found.items() if process is not None}

    def publish(self, document: dict[str, Any]) -> None:
        """Write up.json: the stack is ready."""
        write_private(self.up_file, msgspec.json.format(msgspec.json.encode(document), indent=2))

    def published(self) -> dict[str, Any] | None:
        """up.json, while a stack is ready. Raises Invalid for a damaged one."""
        if not self.up_file.exists():
            return None
        try:
            return _DOCUMENT.decode(self.up_file.read_bytes())
        except ValueError as error:
            raise Invalid(
                str(self.up_file), "it is damaged", "Run `make down`, then `make up`"
            ) from error

    def publish_targets(self, targets: list[dict[str, Any]]) -> None:
        """Write what a Prometheus of this machine scrapes; nothing if no process shows metrics."""
        if targets:
            self._targets_file.write_bytes(
                msgspec.json.format(msgspec.json.encode(targets), indent=2)
            )

    def forget(self) -> None:
        """Remove up.json and the record: nothing runs here."""
        self.up_file.unlink(missing_ok=True)
        self._targets_file.unlink(missing_ok=True)
        self._pids_file.unlink(missing_ok=True)

    def end_leftovers(self) -> list[str]:
        """End what a killed supervisor left behind; returns the names. Only for the owner of the
        lock."""
        left = {name: process for name, process in self.alive().items() if name != SUPERVISOR}
        everyone = [
            each
            for process in left.values()
            for each in (process, *process.children(recursive=True))
        ]
        for process in everyone:
            if is_alive(process):
                process.terminate()
        for process in everyone:
            if not wait_until_gone(process, timeout_s=LEFTOVER_GRACE_S):
                process.kill()
                wait_until_gone(process, timeout_s=LEFTOVER_GRACE_S)
        self.forget()
        return sorted(left)


class StackRecord:
    """Writes the record and up.json of one stack. Once the stack is ready, a write that fails on a
    full disk is retried later: a missing file must not end a stack."""

    def __init__(self, state_dir: StateDir, say: Callable[[str], None]) -> None:
        self._state_dir = state_dir
        self._say = say
        self._pids: dict[str, int] = {}
        self._document: dict[str, Any] = {}
        self._is_true = True

    def publish(self, document: dict[str, Any]) -> None:
        """Write up.json, now that the stack is ready, and keep its list of processes current."""
        self._document = document
        self.write(self._pids)

    def write(self, pids: dict[str, int]) -> None:
        """These processes run. Raises OSError, but only before the stack is ready."""
        self._pids = pids
        try:
            self._state_dir.record(pids)
            if self._document:
                self._state_dir.publish({**self._document, "processes": pids})
        except OSError as error:
            if not self._document:
                raise
            if self._is_true:
                self._say(f"{self._state_dir.up_file} cannot be written for now: {error.strerror}")
            self._is_true = False
        else:
            self._is_true = True

    def catch_up(self) -> None:
        """Retry a write that failed."""
        if not self._is_true:
            self.write(self._pids)


class StateDirLock:
    """A lock that the kernel frees when its owner dies, however it dies."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._file = self._path.open("a")
        if not try_lock(self._file.fileno()):
            self._file.close()
            raise AlreadyUp(
                f"a stack already runs in {self._path.parent}. Stop it with `make down`"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def write_private(path: Path, content: bytes) -> None:
    """Replace a file at once, readable by its owner only: readers see the old one or the new one,
    never half. Raises OSError, on a full disk too; then nothing has changed."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
