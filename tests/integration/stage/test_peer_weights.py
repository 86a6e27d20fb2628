"""A model's folder copied from another worker, on real sockets and a real Postgres."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Engine
from structlog.testing import capture_logs

from services.stage.fleet.peer_server import PIECE_BYTES, PeerServer
from services.stage.fleet.peer_weights import FOLDER, Copying, with_folders
from services.stage.hop.sockets import Sockets
from services.stage.model.model_info import ModelInfo, model_files
from services.stage.model.weights import fingerprint
from services.stage.settings import StageSettings
from shardline.base.errors import Invalid, Unavailable
from shardline.store import fleets
from shardline.store.fleets import PeerAddress, WorkerOffer
from shardline.store.models import register_model
from tests.integration.rows import LONG_S
from tests.models import save_model
from tests.polling import until

NAME = "tiny"
WEIGHTS = "model.safetensors"
Serve = Callable[..., PeerServer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("source") / "model", "llama")


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets(bind="tcp://127.0.0.1")
    yield sockets
    sockets.close()


@pytest.fixture
def serve(engine: Engine, sockets: Sockets, model: Path) -> Iterator[Serve]:
    """Starts workers that have joined with the model, or with what is in another folder."""
    servers: list[PeerServer] = []

    def start(worker: str, folder: Path = model) -> PeerServer:
        server = PeerServer(sockets, {NAME: model_files(folder)})
        server.start()
        servers.append(server)
        with engine.begin() as connection:
            peer = PeerAddress(machine=worker, address=server.address)
            fleets.announce(connection, worker, [NAME], lease_s=LONG_S, peer=peer)
            fleets.join(
                connection, worker, {NAME: WorkerOffer(shapes={}, profile={})}, lease_s=LONG_S
            )
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def registered(engine: Engine, model: Path, tmp_path: Path) -> str:
    """The fingerprint that Postgres has."""
    row = ModelInfo.read(model).row(name=NAME, fingerprint=fingerprint(model, tmp_path / "own"))
    with engine.begin() as connection:
        register_model(connection, row)
    return str(row["fingerprint"])


@pytest.fixture
def copying(engine: Engine, sockets: Sockets, tmp_path: Path) -> Copying:
    return Copying(NAME, tmp_path / "cache", engine, sockets)


def draft(copying: Copying, trusted: str) -> Path:
    return copying.cache_folder / FOLDER / f"{trusted}.part"


def test_a_copy_is_the_model_and_is_used_again_when_nobody_serves_it(
    copying: Copying, serve: Serve, model: Path, registered: str, engine: Engine
) -> None:
    serve("a")
    folder = copying.folder(LONG_S)
    assert fingerprint(folder, copying.cache_folder) == registered
    assert {path.name for path in folder.iterdir()} == {path.name for path in model_files(model)}
    with engine.begin() as connection:
        fleets.leave(connection, "a")
    assert copying.folder(0.0) == folder


def test_workers_of_one_host_copy_once(copying: Copying, serve: Serve, registered: str) -> None:
    serve("a")
    with capture_logs() as logs, ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: copying.folder(LONG_S), range(4)))
    assert [folder.name for folder in folders] == [registered]
    assert [log["event"] for log in logs].count("model copied") == 1


def test_what_is_here_of_a_file_is_not_asked_for_again(
    copying: Copying, serve: Serve, model: Path, registered: str
) -> None:
    """The worker that is asked has only the rest of the weights."""
    part = draft(copying, registered)
    part.mkdir(parents=True)
    content = (model / WEIGHTS).read_bytes()
    half = len(content) // 2
    (part / WEIGHTS).write_bytes(content[:half])
    rest = shutil.copytree(model, copying.cache_folder / "rest")
    (rest / WEIGHTS).write_bytes(bytes(half) + content[half:])
    (part / "config.json").write_bytes((model / "config.json").read_bytes() + b"longer than it is")
    serve("a", rest)
    assert (copying.folder(LONG_S) / WEIGHTS).read_bytes() == content


def test_other_weights_are_refused_and_the_next_worker_is_asked(
    copying: Copying, serve: Serve, model: Path, registered: str, tmp_path: Path
) -> None:
    wrong = shutil.copytree(model, tmp_path / "wrong")
    content = bytearray((wrong / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (wrong / WEIGHTS).write_bytes(content)
    serve("wrong", wrong)
    with (
        capture_logs() as logs,
        pytest.raises(Unavailable, match="none of 1 workers gave all of the model 'tiny'"),
    ):
        copying.folder(LONG_S)
    assert "has other weights" in logs[-1]["problem"]
    assert not draft(copying, registered).exists()
    serve("right")
    assert fingerprint(copying.folder(LONG_S), copying.cache_folder) == registered


def test_a_worker_that_is_gone_is_passed_over(
    copying: Copying, serve: Serve, registered: str
) -> None:
    serve("gone").stop()
    serve("here")
    assert copying.folder(LONG_S).name == registered


def test_nobody_who_has_the_model_is_waited_for_and_then_named(
    copying: Copying, serve: Serve, registered: str
) -> None:
    with pytest.raises(Unavailable, match="no worker has the model 'tiny'"):
        copying.folder(0.0)
    with ThreadPoolExecutor(1) as pool, capture_logs() as logs:
        found = pool.submit(copying.folder, LONG_S)
        until(lambda: len(logs) > 0)
        serve("late")
        assert found.result().name == registered


def test_a_disk_without_room_is_named_before_anything_is_copied(
    copying: Copying,
    serve: Serve,
    registered: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve("a")
    usage = shutil.disk_usage(copying.cache_folder.parent)._replace(free=PIECE_BYTES // 1024)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        Unavailable,
        match=r"bytes more in .*, where 1,024 are free\. Make room, or set SHARDLINE_CACHE_DIR",
    ):
        copying.folder(LONG_S)
    assert list(draft(copying, registered).iterdir()) == []


def test_settings_get_folders_in_place_of_peers(
    copying: Copying, serve: Serve, model: Path, registered: str
) -> None:
    serve("a")
    asked = StageSettings(
        model=f"peer:{NAME}",
        layers="planned",
        further_models=f"other={model}",
        cache_dir=copying.cache_folder,
    )
    assert (asked.asks_peers, asked.name) == (True, NAME)
    got = with_folders(asked, copying.database, copying.sockets)
    assert (got.name, Path(got.model).name, got.asks_peers) == (NAME, registered, False)
    assert [each.model for each in got.every_model][1:] == [str(model)]
    with pytest.raises(Invalid, match="peer:NAME is for workers of a fleet"):
        with_folders(asked.model_copy(update={"layers": "0-3"}), copying.database, copying.sockets)
