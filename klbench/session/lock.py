"""The lock of a session: which runner works in the folder.

Invariants: taking is one step of the file system (a hard link, which network disks do too), so of two that
try at once one wins, also from two hosts; only a lock of this host and this numbering of pids is ever judged
dead, for nobody can know of a process elsewhere; a lock that was taken away is noticed by its owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from klbench.core.text import elapsed
from klbench.errors import UsageError
from klbench.session.process_identity import process_start, this_host, this_namespace
from klbench.storage import read_small


class Lock(msgspec.Struct, frozen=True, kw_only=True):
    """The lock file: the runner that works in the folder."""

    host: str
    pid: int
    start: str
    """What tells this process from another with its pid (process_identity.py)."""
    namespace: str = ""
    """The numbering of the pid: on one host each container has its own."""
    socket: str = ""
    taken_at: float = 0.0

    @property
    def local(self) -> bool:
        """Whether its pid means a process that can be seen from here."""
        return self.host == this_host() and self.namespace in ("", this_namespace())

    @property
    def alive(self) -> bool:
        """Whether its runner may be alive: always so for one that cannot be seen from here."""
        return not self.local or process_start(self.pid) == self.start

    @property
    def where(self) -> str:
        """`pid 4211`, `pid 4211 on node7`, `pid 17 in another container of this host`."""
        if self.local:
            return f"pid {self.pid}"
        same_host = self.host == this_host()
        return f"pid {self.pid} " + ("in another container of this host" if same_host else f"on {self.host}")


def read_lock(file: Path) -> Lock | None:
    """The lock, or None when there is none or it cannot be understood."""
    try:
        return msgspec.json.decode(read_small(file), type=Lock)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


@contextlib.contextmanager
def held(file: Path, *, socket: str = "") -> Iterator[Lock]:
    """Holds the lock in `file`. Raises UsageError when a runner has it, OSError where the disk refuses."""
    mine = Lock(
        host=this_host(),
        pid=os.getpid(),
        start=process_start(os.getpid()) or "",
        namespace=this_namespace(),
        socket=socket,
        taken_at=time.time(),
    )
    _take(file, mine)
    try:
        yield mine
    finally:
        # Only our own: somebody may have taken the session over.
        if read_lock(file) == mine:
            file.unlink(missing_ok=True)


def _take(file: Path, mine: Lock) -> None:
    handle, draft = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as output:
            output.write(msgspec.json.encode(mine))
            output.flush()
            os.fsync(output.fileno())
        if not _linked(draft, file):
            _take_over(draft, file)
        if read_lock(file) != mine:
            raise _refused(file, read_lock(file))
    finally:
        with contextlib.suppress(OSError):
            os.unlink(draft)


def _linked(draft: str, file: Path) -> bool:
    """Whether the draft became the lock; False where there is one, or where a disk knows no hard links."""
    try:
        os.link(draft, file)
    except OSError:
        # The answer of a network disk may be lost although it did it: the count of links tells.
        return os.stat(draft).st_nlink == 2
    return True


def _take_over(draft: str, file: Path) -> None:
    """Replaces a lock that is dead or damaged, or makes one where links are unknown."""
    with open(f"{file}.guard", "w", encoding="ascii") as guard:
        # Judging and taking are one step among those who can see whether it is dead.
        with contextlib.suppress(OSError):
            fcntl.flock(guard, fcntl.LOCK_EX)
        there = read_lock(file)
        if there is not None and there.alive:
            raise _refused(file, there)
        os.replace(draft, file)


def _refused(file: Path, there: Lock | None) -> UsageError:
    name = file.parent.name
    if there is None or there.local:
        where = f" ({there.where})" if there is not None else ""
        return UsageError(
            f"another klbench works on the session {name}{where}",
            why="a session has one runner at a time",
            next=f"klbench open {file.parent}",
        )
    return UsageError(
        f"another klbench works on the session {name} ({there.where})",
        why=f"whether a process elsewhere is alive cannot be known from here; {_last_sign(file)}",
        next=f"if it is gone for good, remove {file}",
    )


def _last_sign(file: Path) -> str:
    """When its event log last grew, by which a user may judge."""
    try:
        silent_s = max(0.0, time.time() - os.stat(file.parent / "events.jsonl").st_mtime)
    except OSError:
        return "it has written nothing yet"
    return f"its last sign of life is {elapsed(silent_s)} old"
