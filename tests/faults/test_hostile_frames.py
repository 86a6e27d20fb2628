"""More than 100,000 hostile frames, messages and connections at a real stage's ports: it drops them
and serves on."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psutil
import pytest
import zmq
from msgspec.structs import replace as replace_struct

from services.stage.hop import Channel, Frame, Kind, Receiver
from services.stage.hop.frame import Buffer, encode
from services.stage.hop.sockets import Sockets
from services.stage.hop.zeromq import ZeroMqHop
from services.stage.pipeline import messages
from services.stage.pipeline.registry import RedisRegistry
from services.standalone.servers import Valkey
from services.standalone.settings import CLERK
from shardline.base.config import Times
from shardline.base.errors import ProtocolError
from shardline.contract.wire import StageCard
from shardline_scheduler.step_plan import encode as encode_step
from tests.faults import hostile
from tests.faults.hostile import GOOD, PROMPT
from tests.faults.played_head import PATIENCE_S, PlayedHead
from tests.polling import until
from tests.repository import REPOSITORY

NUM_FRAMES = 50_000
NUM_MESSAGES = 60_000
NUM_CALLS = 2_000
NUM_LINKS = 300
BURST = 400
GROWTH_MAX_BYTES = 96 << 20
CONFIG = json.loads((CLERK / "config.json").read_text())
WIDTH = CONFIG["hidden_size"]
NUM_LAYERS = CONFIG["num_hidden_layers"]
HIDDEN = [((7 * place) % 13 - 6) / 8 for place in range(len(PROMPT) * WIDTH)]


class Tail:
    """The tail of the demo model, as `python -m services.stage` runs it, and a head that the test
    plays."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        settings = {
            "SHARDLINE_MODEL": str(CLERK),
            "SHARDLINE_MODEL_NAME": "clerk",
            "SHARDLINE_REDIS_URL": redis_url,
            "SHARDLINE_LAYERS": f"{NUM_LAYERS - 2}-{NUM_LAYERS - 1}",
            "SHARDLINE_DEVICE_SHARED": "1",
            "SHARDLINE_SEATS": "4",
            "SHARDLINE_KV_MIB": "8",
            "SHARDLINE_KV_OFFLOAD_MIB": "1",
            "SHARDLINE_HOP_TRANSPORT": "tcp",
            # What gets past the key, or in where none is.
            "SHARDLINE_HOP_INSECURE": "true",
            "SHARDLINE_HOP_BIND": "127.0.0.1",
            "SHARDLINE_HOP_HOST": "127.0.0.1",
            "SHARDLINE_LOCK_DIR": str(folder / "locks"),
            "SHARDLINE_CACHE_DIR": str(folder / "cache"),
        }
        self._log = folder / "stage.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.stage"],
                cwd=REPOSITORY,
                env={**os.environ, **settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.card = self._await_card(redis_url)
        self.head = PlayedHead(self.card)

    def _await_card(self, redis_url: str) -> StageCard:
        registry = RedisRegistry(redis_url)
        until(lambda: bool(registry.cards("clerk")) or not self.lives())
        assert self.lives(), self._log.read_text()
        (card,) = registry.cards("clerk")
        registry.close()
        return card

    def lives(self) -> bool:
        """The same process as ever."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """The end of its log."""
        return self._log.read_text()[-4000:]

    def rss_bytes(self) -> int:
        """What it holds now."""
        return rss_bytes(self._process.pid)

    def frame(self, message: bytes) -> Frame:
        """Step 0 with activations for the prompt."""
        return self.head.frame(message, HIDDEN, width=WIDTH)

    def generate(self) -> tuple[tuple[int, ...], ...]:
        """A new epoch and its first token."""
        self.head.wire()
        return self.head.compute(self.frame(encode_step(GOOD))).tokens

    def end(self) -> None:
        """As Ctrl-C does."""
        self.head.close()
        self._process.terminate()
        self._process.wait()


class Intruder:
    """A stranger's socket."""

    def __init__(self, kind: int, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
        self._socket.connect(address)

    def __enter__(self) -> Intruder:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def send(self, parts: Sequence[Buffer]) -> None:
        """Whatever it is."""
        self._socket.send_multipart(parts)

    def is_answered(self, hello: messages.Hello) -> bool:
        """Says HELLO; true when everything before it was read, and the answer is a refusal."""
        self._socket.send(messages.encode(hello))
        while self._socket.poll(100):
            answer = messages.decode_to_head(self._socket.recv_multipart()[0])
            if isinstance(answer, messages.Refuse) and answer.epoch == hello.epoch:
                return True
        return False


def rss_bytes(pid: int) -> int:
    rss: int = psutil.Process(pid).memory_info().rss
    return rss


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def tail(server_home: Path) -> Iterator[Tail]:
    """One for all attacks: what one leaves behind, the next one meets."""
    folder = server_home / "tail"
    folder.mkdir()
    redis = Valkey(folder)
    redis.start()
    tail = Tail(redis.url, folder)
    yield tail
    tail.end()
    redis.kill()


@pytest.fixture
def unharmed(tail: Tail) -> Iterator[None]:
    """After the attack the stage lives, has not grown, and generates the same token."""
    before = tail.generate()
    rss_bytes = tail.rss_bytes()
    yield
    assert tail.lives(), tail.last_words()
    assert tail.generate() == before
    assert len(before) == 1
    assert tail.rss_bytes() - rss_bytes < GROWTH_MAX_BYTES


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize(
    "message", hostile.damaged_messages().values(), ids=hostile.damaged_messages()
)
def test_a_plan_that_does_not_fit_loses_its_epoch(tail: Tail, message: bytes) -> None:
    tail.head.wire()

    tail.head.send(encode(tail.frame(message)))

    assert tail.head.told()


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"tensor": None, "dtype": "", "shape": ()},
            "activations of float32 are needed, the frame has none",
        ),
        (
            {"dtype": "bfloat16", "shape": (6, WIDTH)},
            "activations of float32 are needed, the frame has bfloat16",
        ),
        ({"shape": (1, 3 * WIDTH)}, "activations .* are needed, not"),
        ({"step": 1}, "step 1 came where step 0 was due"),
        ({"epoch": 1 << 40}, "a frame of epoch"),
        ({"pipeline": uuid4()}, "a frame of pipeline"),
        ({"kind": Kind.RESULT}, "a RESULT frame on a link for PLAN frames"),
    ],
)
def test_a_frame_that_does_not_fit_loses_its_epoch(
    tail: Tail, change: dict[str, Any], reason: str
) -> None:
    tail.head.wire()

    tail.head.send(encode(replace(tail.frame(encode_step(GOOD)), **change)))

    assert re.search(reason, tail.head.told())


@pytest.mark.usefixtures("unharmed")
def test_bursts_of_broken_frames_lose_only_their_epochs(tail: Tail, rng: random.Random) -> None:
    for _ in range(NUM_LINKS):
        tail.head.wire()
        good = encode(tail.frame(encode_step(GOOD)))
        while tail.head.send(hostile.broken(rng, good)):
            pass  # Until the stage has had enough of this link.
        assert tail.head.told()


@pytest.mark.usefixtures("unharmed")
def test_no_hostile_control_message_is_obeyed(tail: Tail, rng: random.Random) -> None:
    tail.head.wire()
    messages = hostile.control_messages()
    last = replace_struct(tail.head.hello(), pipeline=UUID(int=1), epoch=99)
    with Intruder(zmq.DEALER, tail.card.control) as intruder:
        for number in range(NUM_MESSAGES):
            if number % BURST == 0:
                tail.head.beat()
            message = [rng.choice(messages)]
            intruder.send(rng.choice((message, hostile.broken(rng, message))))
        until(lambda: intruder.is_answered(last))

    assert len(tail.head.compute(tail.frame(encode_step(GOOD))).tokens) == 1, (
        "the bound epoch did not survive it"
    )


@pytest.mark.usefixtures("unharmed")
def test_ports_serve_on_after_nonsense_of_strangers(tail: Tail, rng: random.Random) -> None:
    for _ in range(NUM_CALLS):
        address, kind = rng.choice(
            ((tail.card.control, b"DEALER"), (tail.head.hop_address, b"PUSH"))
        )
        host, _, port = address.removeprefix("tcp://").partition(":")
        try:
            connection = socket.create_connection((host, int(port)), PATIENCE_S)
        except ConnectionError:
            tail.head.wire()  # The stranger before met the hop, and cost it its epoch.
            continue
        with connection, suppress(ConnectionError):
            connection.sendall(hostile.calls(rng, kind))


def test_a_receiver_goes_on_after_broken_frames(rng: random.Random) -> None:
    sockets = Sockets(bind="tcp://127.0.0.1")
    channel = Channel(pipeline=uuid4(), epoch=3, kind=Kind.PLAN, num_lanes=BURST)
    receiver = ZeroMqHop(sockets, Times()).open_receiver(channel)
    before_bytes = rss_bytes(os.getpid())
    num_refused = num_passed = 0
    with Intruder(zmq.PUSH, receiver.address) as intruder:
        while num_refused < NUM_FRAMES:
            good = encode(example(channel, num_passed))
            for _ in range(BURST):
                intruder.send(hostile.broken(rng, good))
            intruder.send(good)
            refused, passed = take(receiver, num_passed)
            num_refused = num_refused + refused
            num_passed = num_passed + passed
    receiver.close()
    sockets.close()

    assert num_passed > 1
    assert rss_bytes(os.getpid()) - before_bytes < GROWTH_MAX_BYTES


def example(channel: Channel, step: int) -> Frame:
    tensor = memoryview(bytes(48))
    return Frame(
        kind=channel.kind,
        pipeline=channel.pipeline,
        epoch=channel.epoch,
        step=step,
        message=encode_step(GOOD),
        tensor=tensor,
        dtype="float32",
        shape=(3, 4),
    )


def take(receiver: Receiver, due: int) -> tuple[int, int]:
    """Until no more come: how many frames were refused, and how many passed."""
    num_refused = num_passed = 0
    while True:
        try:
            frame = receiver.receive(0.002 if num_refused else PATIENCE_S)
        except ProtocolError:
            num_refused += 1
            continue
        if frame is None:
            return num_refused, num_passed
        assert frame.step == due + num_passed
        num_passed += 1
