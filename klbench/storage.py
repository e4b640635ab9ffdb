"""Files that may be anybody's, and disks that refuse: which errors mean that, what to say, what is free.

    klbench: cannot write /scratch/s/events.jsonl · No space left on device (0 B free) · free some space: ...

Invariants: nothing heavy is imported, for every command needs it; a name that comes out of a file leads to a
regular file in its own folder or nowhere.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

from klbench.core.text import size
from klbench.errors import UndecidedError, UsageError

FLOOR_BYTES = 64 * 1024**2
"""Room that work leaves on a disk: others write there too, and a server without room for its log dies."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CLOSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_BROKEN = frozenset({errno.EIO, errno.ESTALE, errno.ENOLCK, errno.ENOTDIR, errno.ENODEV})


class StorageError(UndecidedError):
    """The disk refuses: it is full, read-only, or broken. What was written before is readable."""


def refused_by_disk(error: BaseException) -> bool:
    """Whether the error says that a file could not be written for a reason outside of klbench."""
    return isinstance(error, OSError) and error.errno in _FULL | _CLOSED | _BROKEN


def storage_error(error: OSError, place: Path | None = None) -> StorageError:
    """The error for a user. `place` is the file where the error does not name one."""
    name = error.filename if isinstance(error.filename, str) else None
    file = Path(name) if name else place
    why = error.strerror or str(error)
    if error.errno in _FULL:
        free = free_bytes(file) if file is not None else None
        why += f" ({size(free)} free)" if free is not None else ""
        step = "free some space (klbench sessions prune frees traces), or name a folder on another disk"
    elif error.errno in _CLOSED:
        step = "make it writable, or name another folder with --session DIR or KLBENCH_HOME"
    else:
        step = "look at the disk, or name a folder on another one with --session DIR or KLBENCH_HOME"
    return StorageError(f"cannot write {file or 'the output'}", why=why, next=step)


def free_bytes(place: Path) -> int | None:
    """What this user may still write beside the file or in the folder; None where nobody can say."""
    for folder in (place, *place.parents):
        try:
            status = os.statvfs(folder)
        except OSError:
            continue
        return status.f_bavail * status.f_frsize
    return None


def file_inside(folder: Path, name: str) -> Path:
    """The file in `folder` that somebody's log names, with links followed; it need not be there.

    Raises UsageError for one that lies outside, and for what is no regular file: a log from elsewhere must
    not make us read other files, wait for a pipe or read a device without end.
    """
    try:
        file = (folder / name).resolve()
        inside = file.is_relative_to(folder.resolve())
        special = inside and file.exists() and not file.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        # Too long, with a zero byte in it, or links in a circle.
        raise UsageError(f"the session names no file: {name[:200]!r}", why=str(error)[:200]) from error
    if not inside:
        raise UsageError(f"the session names a file outside of itself: {name!r}")
    if special:
        raise UsageError(f"the session names what is no regular file: {name!r}")
    return file


def open_regular(file: Path) -> IO[bytes]:
    """The file, open to be read. Raises OSError, also for what is no regular file; waits for no pipe."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(file))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_small(file: Path, most_bytes: int = 1024**2) -> bytes:
    """The content of a file that is small wherever it is ours. Raises OSError, also for a larger one and for
    what is no regular file."""
    with open_regular(file) as source:
        content = source.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes", str(file))
    return content


def too_little_room(place: Path) -> StorageError | None:
    """The error when less than the floor is left there: 64 MiB, or a fiftieth of a smaller disk."""
    try:
        status = os.statvfs(place)
    except OSError:
        return None
    free, whole = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    if whole == 0 or free >= min(FLOOR_BYTES, whole // 50):
        return None
    return StorageError(
        f"stopped before the disk of {place} is full",
        why=f"{size(free)} of {size(whole)} are free",
        next="free some space (klbench sessions prune frees traces), then continue",
    )
