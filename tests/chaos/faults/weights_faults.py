"""Weights that are damaged when a stage starts: it must refuse them clearly, compute nothing with
them, and not keep the machine busy with starts; mended, the stack goes on. A flipped bit breaks no
file: the other stages refuse it."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.standalone.processes import wait_until_gone
from tests.chaos.faults.fault import Broken, Fault, NotInjected, hold
from tests.chaos.faults.kill_faults import GONE_S
from tests.chaos.judge.remains import kv_in_use, num_workers
from tests.chaos.stack.local_target import LocalTarget
from tests.polling import within

LENGTH_BYTES = 8
HUGE_BYTES = 1 << 40
NOTICE_S = 90.0
"""A stage starts, reads, and refuses or is refused; on a busy machine, after a backoff."""

LEASES = 1.5
MAX_REFUSALS = 20
"""Within a lease or two: the supervisor waits longer and longer."""

HEADS_LOG = "stage-0"
LAYER = r"layers?\.\d+\."
"""In names of tensors; encoders of BERT's kind have `layer`."""

Harm = Callable[[bytes, random.Random], bytes]


def cut_short(whole: bytes, rng: random.Random) -> bytes:
    """As a copy that was broken off."""
    return whole[: rng.randrange(len(whole) // 2, len(whole))]


def with_oversized_header(whole: bytes, rng: random.Random) -> bytes:
    """The length in front says more than any file has."""
    return (HUGE_BYTES + rng.randrange(HUGE_BYTES)).to_bytes(LENGTH_BYTES, "little") + whole[
        LENGTH_BYTES:
    ]


def with_wrong_shapes(whole: bytes, rng: random.Random) -> bytes:
    """Each layer's first oblong matrix lies on its side: as many bytes, and a header that is right
    in itself."""
    begin = LENGTH_BYTES + int.from_bytes(whole[:LENGTH_BYTES], "little")
    tensors = json.loads(whole[LENGTH_BYTES:begin])
    layers: dict[str, str] = {}
    for name, tensor in sorted(tensors.items()):
        if (found := re.search(LAYER, name)) and len(set(tensor["shape"])) > 1:
            layers.setdefault(found[0], name)
    for name in layers.values():
        tensors[name]["shape"].reverse()
    header = json.dumps(tensors, separators=(",", ":")).encode()
    return len(header).to_bytes(LENGTH_BYTES, "little") + header + whole[begin:]


def with_flipped_bit(whole: bytes, rng: random.Random) -> bytes:
    """One bit of one number."""
    begin = LENGTH_BYTES + int.from_bytes(whole[:LENGTH_BYTES], "little")
    place = rng.randrange(begin, len(whole))
    return whole[:place] + bytes([whole[place] ^ (1 << rng.randrange(8))]) + whole[place + 1 :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What a file may look like, and how somebody must say so."""

    what: str
    harm: Harm
    said: str
    """A pattern of the line that refuses."""
    by_head: bool = False
    """The file can be loaded: it is the head that compares, and the stage runs until it is
    ended."""

    @property
    def kind(self) -> str:
        """Its name in chaos.json."""
        return f"weights: {self.what}"

    @property
    def is_kill(self) -> bool:
        """A stage is killed, so that it reads its weights again."""
        return True

    def missing(self, target: LocalTarget) -> str | None:
        """A flipped bit is seen only by comparing."""
        if self.by_head and target.num_stages == 1:
            return "a pipeline of one stage has nobody to compare weights with"
        return None

    def strike(self, target: LocalTarget, rng: random.Random) -> None:
        """A stage in a random place; the others keep what they loaded before."""
        if not within(
            NOTICE_S, lambda: len(kv_in_use(target, num_workers(target))) == num_workers(target)
        ):
            raise NotInjected("another stage is still reading its weights")
        name, pid = target.pick(rng, "stage-")
        log = target.stack.home.folder / "logs" / f"{HEADS_LOG if self.by_head else name}.log"
        try:
            with damaged(target.model / "model.safetensors", self.harm, rng):
                begin = log.stat().st_size
                _kill(name, pid)
                if not within(NOTICE_S, lambda: self._num_refusals(log, begin) > 0):
                    raise Broken(
                        f"{name} has damaged weights, and nobody says {self.said!r} in {log.name}"
                    )
                hold(LEASES * target.times.lease_s)
                num_refusals = self._num_refusals(log, begin)
            if num_refusals > MAX_REFUSALS and not self.by_head:
                raise Broken(f"{name} was started {num_refusals} times within {LEASES} leases")
        finally:
            if self.by_head:
                _kill(*target.pick(rng, name))

    def _num_refusals(self, log: Path, begin: int) -> int:
        with log.open(errors="replace") as lines:
            lines.seek(begin)
            return sum(re.search(self.said, line) is not None for line in lines)


@contextmanager
def damaged(path: Path, harm: Harm, rng: random.Random) -> Iterator[None]:
    """The file is replaced, and put back: what is open stays what it was, as with any careful
    copying tool."""
    whole = path.read_bytes()
    safe = path.parent.with_name("safe.safetensors")
    shutil.copy2(path, safe)
    draft = path.with_name("draft")
    draft.write_bytes(harm(whole, rng))
    draft.rename(path)
    try:
        yield
    finally:
        safe.rename(path)


def _kill(name: str, pid: int) -> None:
    process = psutil.Process(pid)
    process.kill()
    if not wait_until_gone(process, timeout_s=GONE_S):
        raise NotInjected(f"{name} survived SIGKILL")


FILE = r"model\.safetensors"
REMEDY = "Copy the model again"

FAULTS: tuple[Fault, ...] = (
    Damage(what="cut short", harm=cut_short, said=f"{FILE} is cut short.*{REMEDY}"),
    Damage(what="oversized header", harm=with_oversized_header, said=f"{FILE} .*header.*{REMEDY}"),
    Damage(what="wrong shapes", harm=with_wrong_shapes, said=rf"{LAYER}.*{REMEDY}"),
    Damage(what="a flipped bit", harm=with_flipped_bit, said="other weights", by_head=True),
)
