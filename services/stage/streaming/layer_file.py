"""A file without a name for weights that memory does not hold: written once, read past the page
cache, gone with the process. Knows no layer."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from shardline.base.errors import Invalid, Unavailable

PAGE_BYTES = 4096
"""Reads past the page cache begin and end at multiples of it, in the file and in memory."""
FIELD = "SHARDLINE_STREAMED_LAYERS_DIR"


class LayerFile:
    """Closed when it is collected. A separate thread reads, one piece after the other."""

    def __init__(self, folder: Path) -> None:
        """Makes the file, empty. Raises Invalid if the folder takes none."""
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                self._file = os.dup(file.fileno())
                self._direct = _past_page_cache(self._file)
        except OSError as error:
            raise self._no_room(error) from error
        for each in (self._file, self._direct):
            weakref.finalize(self, os.close, each)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="streamed-layers")

    def write(self, pieces: list[tuple[int, Tensor]], begin: int, num_bytes: int) -> None:
        """Writes tensors, int8 [bytes], each at its place behind `begin`, and leaves nothing of
        them in memory.

        Raises Invalid if the disk has no room for `num_bytes`.
        """
        try:
            os.posix_fallocate(self._file, begin, num_bytes)
            for place, tensor in pieces:
                _write(self._file, tensor.numpy().data, begin + place)
            os.fdatasync(self._file)
            os.posix_fadvise(self._file, begin, num_bytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._no_room(error) from error

    def buffer(self, num_bytes: int) -> Tensor:
        """Returns int8 [num_bytes] that begins with a page, in large pages where there are some."""
        memory = mmap.mmap(-1, num_bytes)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.int8)

    def fetch(self, target: Tensor, begin: int) -> Callable[[], object]:
        """Begins to fill `target`, int8 [bytes] of a buffer, from `begin` on. Returns what waits
        for it, which raises Unavailable if the disk fails."""
        return self._reader.submit(self._read_all, target, begin).result

    def _read_all(self, target: Tensor, begin: int) -> None:
        view = target.numpy().data
        done = 0
        try:
            while done < len(view):
                done += _read(self._direct, view[done:], begin + done)
        except OSError as error:
            raise Unavailable(
                f"streamed layers cannot be read from {self._folder}: {error.strerror}"
            ) from error

    def _no_room(self, error: OSError) -> Invalid:
        problem = f"streamed layers find no room in {self._folder}: {error.strerror}"
        return Invalid(FIELD, problem, "Name a folder on a disk with room for the model's weights")


def _write(file: int, source: memoryview, begin: int) -> None:
    done = 0
    while done < len(source):
        done += os.pwrite(file, source[done:], begin + done)


def _read(file: int, target: memoryview, begin: int) -> int:
    if num_bytes := os.preadv(file, [target], begin):
        return num_bytes
    raise OSError(errno.EIO, "the file is shorter than it was")


def _past_page_cache(file: int) -> int:
    """The file once more, for reads that leave nothing in the page cache, if its file system has
    such."""
    path = f"/proc/self/fd/{file}"
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system in memory
        return os.open(path, os.O_RDONLY)
