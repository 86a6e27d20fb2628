"""Answers other workers of a fleet: how far away they are, and the files of a model.

Owns the messages, and the thread that answers them in order at a ROUTER. Knows no plan, and of a
model only its files.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
import zmq

from services.stage.hop.sockets import SocketFactory

PIECE_BYTES = 1 << 20
"""Of a file, in one answer; about what a step of 256 rows sends."""
WINDOW = 8
"""Pieces for which a worker asks ahead."""
LIMITS: dict[int, int] = {
    zmq.RCVHWM: 2 * WINDOW,
    zmq.SNDHWM: 2 * WINDOW,
    zmq.MAXMSGSIZE: 2 * PIECE_BYTES,
}
"""Of both ends' sockets: a ROUTER drops what a peer has no room for."""
OK = b"ok"
REFUSED = b"refused"

log = structlog.get_logger(__name__)


class Echo(msgspec.Struct, frozen=True, tag="echo"):
    """Is answered without content, whatever it carries."""

    load: bytes = b""


class ListFiles(msgspec.Struct, frozen=True, tag="list"):
    """Is answered with a FileSize for each file of a model."""

    model: str


class ReadFile(msgspec.Struct, frozen=True, tag="read"):
    """Is answered with `num_bytes` of a file, fewer at its end."""

    model: str
    name: str
    offset: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    length: Annotated[int, msgspec.Meta(ge=0, le=PIECE_BYTES)]


class FileSize(msgspec.Struct, frozen=True):
    """One file of a model's folder."""

    name: str
    num_bytes: Annotated[int, msgspec.Meta(ge=0)]


class PeerServer(threading.Thread):
    """Answers other workers. `files` are those of each model by its name; no others are read."""

    def __init__(self, sockets: SocketFactory, files: Mapping[str, Sequence[Path]]) -> None:
        """Raises Unavailable if no address is free."""
        super().__init__(name="peer-server", daemon=True)
        self._files = {model: {path.name: path for path in paths} for model, paths in files.items()}
        self._decoder = msgspec.msgpack.Decoder(Echo | ListFiles | ReadFile)
        self._socket, self.address = sockets.bind(zmq.ROUTER, LIMITS)
        self._wakeup = sockets.wakeup()
        self._poller = sockets.poller()
        for source in (self._socket, self._wakeup.fd):
            self._poller.register(source, zmq.POLLIN)

    def run(self) -> None:
        """The peer's name comes before its message; an answer to one that is gone is dropped."""
        while not self._wakeup.clear():
            if self._socket in dict(self._poller.poll()):
                peer, *parts = self._socket.recv_multipart(copy=False)
                self._socket.send_multipart(
                    [peer.bytes, *self._answer([part.buffer for part in parts])]
                )
        self._socket.close()
        self._wakeup.close()

    def stop(self) -> None:
        """Ends the thread and closes its socket."""
        self._wakeup.wake()
        self.join()

    def _answer(self, parts: Sequence[memoryview]) -> tuple[bytes, bytes]:
        try:
            (message,) = parts
            question: Echo | ListFiles | ReadFile = self._decoder.decode(message)
            match question:
                case Echo():
                    return OK, b""
                case ListFiles(model=model):
                    return OK, msgspec.msgpack.encode(
                        [_size(path) for path in self._files[model].values()]
                    )
                case ReadFile() as asked:
                    with self._files[asked.model][asked.name].open("rb") as file:
                        file.seek(asked.offset)
                        return OK, file.read(asked.length)
        except (ValueError, msgspec.MsgspecError) as error:
            return REFUSED, f"no question: {error}".encode()
        except KeyError as error:
            return REFUSED, f"{error} is not here".encode()
        except Exception as error:  # noqa: BLE001 (the other workers get answers)
            log.warning("a file cannot be sent to another worker", problem=str(error))
            return REFUSED, str(error).encode()


def _size(path: Path) -> FileSize:
    return FileSize(name=path.name, num_bytes=path.stat().st_size)
