"""Folders and files of one user in places where others may write: never through a link that
somebody else has laid.

In a shared folder such as /tmp a name that can be foreseen may be taken before we come: by another
user's folder, or by a link to a file of ours. Knows no service.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from shardline.base.errors import Invalid

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def user_folder() -> Path:
    """This user's own, not yet made: in XDG_RUNTIME_DIR where the system gives one, else in the
    temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "shardline"
    return Path(tempfile.gettempdir()) / f"shardline-{os.geteuid()}"


def private_folder(path: Path, field: str) -> Path:
    """The folder, made for us alone if there is none. Raises Invalid, naming `field`, if it is
    somebody else's."""
    os.close(open_private_folder(path, field))
    return path.absolute()


def open_private_folder(path: Path, field: str) -> int:
    """Likewise, as a file descriptor: whatever becomes of its name, files opened in it are in this
    folder."""
    path = path.absolute()
    if path != user_folder() and path.is_relative_to(user_folder()):
        os.close(open_private_folder(user_folder(), field))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        problem = "it is a link" if path.is_symlink() else error.strerror or str(error)
        raise Invalid(
            field, f"{path}: {problem}", "Remove it, or name a folder to write in"
        ) from error
    try:
        _check(path, os.fstat(folder), field)
    except Invalid:
        os.close(folder)
        raise
    return folder


def open_private_file(folder: int, name: str, field: str) -> int:
    """A regular file in an open folder, made if there is none, to read and write. Raises Invalid,
    also for a link."""
    remedy = "Remove it, or name another folder"
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        raise Invalid(field, f"{name} cannot be opened: {error.strerror}", remedy) from error
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(file)
        raise Invalid(field, f"{name} is not a regular file with one link", remedy)
    return file


def _check(path: Path, found: os.stat_result, field: str) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        remedy = "Remove it if you may, or name another folder"
        raise Invalid(
            field, f"{path} belongs to the user with the id {found.st_uid}, not to you", remedy
        )
    if found.st_mode & OTHERS_WRITE:
        problem = f"others may write in {path} (mode {stat.S_IMODE(found.st_mode):04o})"
        raise Invalid(field, problem, f"Look what is in it, then: chmod go-w {path}")
