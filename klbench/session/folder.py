"""The folder of a session: what lies where, who may work in it.

    <session>/                 0700
        session.json           schema, version, created, target, options: written once, atomically
        events.jsonl           the event log (log.py)
        lock                   the runner at work: host, pid, its start, its socket
        runs/ traces/ reports/ columns, traces, reports
        exports/               exported operators
        server/                the server's logs and control folder
        runner.log             what a detached runner and its libraries print

A lock from another host is never judged dead, for nobody here can know; a dead local one is taken over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import klbench
from klbench import paths
from klbench.errors import UsageError
from klbench.session.events import SCHEMA
from klbench.session.process_identity import process_start, this_host


class SessionFile(msgspec.Struct, frozen=True, kw_only=True):
    """session.json."""

    schema: str
    klbench_version: str
    created_at: float
    target: dict[str, Any] = {}
    options: dict[str, Any] = {}


class Lock(msgspec.Struct, frozen=True, kw_only=True):
    """The lock file: the runner that works in the folder."""

    host: str
    pid: int
    start: str
    """What tells this process from another with its pid (process_identity.py)."""
    socket: str = ""
    taken_at: float = 0.0

    @property
    def local(self) -> bool:
        return self.host == this_host()

    @property
    def alive(self) -> bool:
        """Whether its runner may be alive: always so for another host."""
        return not self.local or process_start(self.pid) == self.start


@dataclass(frozen=True, slots=True)
class SessionFolder:
    """Paths of one session. Making the object touches nothing."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def traces(self) -> Path:
        return self.path / "traces"

    @property
    def reports(self) -> Path:
        return self.path / "reports"

    @property
    def exports(self) -> Path:
        """Exported operators: standalone scripts with their tensors."""
        return self.path / "exports"

    @property
    def server(self) -> Path:
        return self.path / "server"

    @property
    def runner_log(self) -> Path:
        return self.path / "runner.log"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    def exists(self) -> bool:
        return (self.path / "session.json").is_file() or self.events.is_file()

    def relative(self, file: Path) -> str:
        """The name of a file in events: relative to the session where it lies inside."""
        try:
            return file.relative_to(self.path).as_posix()
        except ValueError:
            return str(file)

    def resolve(self, name: str) -> Path:
        """The file that an event names. Raises UsageError for one that leaves the session: a log from
        elsewhere must not make us read other files."""
        file = (self.path / name).resolve()
        if not file.is_relative_to(self.path.resolve()):
            raise UsageError(f"the session names a file outside of itself: {name!r}")
        return file

    def read_session_file(self) -> SessionFile:
        """session.json; raises UsageError when this is no session or one of a version unknown to us."""
        file = self.path / "session.json"
        try:
            content = msgspec.json.decode(file.read_bytes(), type=SessionFile)
        except FileNotFoundError as error:
            raise UsageError(f"{self.path} is not a klbench session", next="klbench sessions") from error
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {file}", why=str(error)) from error
        if content.schema != SCHEMA:
            raise UsageError(
                f"{self.path} has the format {content.schema!r}; this klbench reads {SCHEMA!r}",
                why=f"klbench {content.klbench_version} wrote it",
                next="open it with that version",
            )
        return content

    def read_lock(self) -> Lock | None:
        """The lock, or None when there is none or it cannot be understood."""
        try:
            return msgspec.json.decode(self.lock_file.read_bytes(), type=Lock)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    @contextlib.contextmanager
    def locked(self, *, socket: str = "") -> Iterator[Lock]:
        """Holds the session's lock. Raises UsageError when a runner works in the folder already."""
        lock = _take_lock(self, socket)
        try:
            yield lock
        finally:
            # Only our own: after a suspended machine somebody else may have taken the session over.
            if self.read_lock() == lock:
                self.lock_file.unlink(missing_ok=True)


def _take_lock(folder: SessionFolder, socket: str) -> Lock:
    mine = Lock(
        host=this_host(),
        pid=os.getpid(),
        start=process_start(os.getpid()) or "",
        socket=socket,
        taken_at=time.time(),
    )
    with open(folder.path / "lock.guard", "w", encoding="ascii") as guard:
        # Makes judging and taking one step among the processes of this host.
        with contextlib.suppress(OSError):
            fcntl.flock(guard, fcntl.LOCK_EX)
        held = folder.read_lock()
        if held is not None and held.alive:
            where = f"pid {held.pid}" if held.local else f"pid {held.pid} on {held.host}"
            raise UsageError(
                f"another klbench works on the session {folder.name} ({where})",
                why="a session has one runner at a time"
                if held.local
                else "whether a process of another host is alive cannot be known from here",
                next=f"klbench open {folder.path}"
                if held.local
                else f"if it is gone for good, remove {folder.lock_file}",
            )
        write_atomically(folder.lock_file, msgspec.json.encode(mine))
    return mine


def write_atomically(file: Path, content: bytes) -> None:
    """Readers see the old file or the new one, whole; mode 0600."""
    handle, draft = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as output:
            output.write(content)
            output.flush()
            os.fsync(output.fileno())
        os.replace(draft, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def make_session(path: Path, target: Mapping[str, Any], options: Mapping[str, Any]) -> SessionFolder:
    """The session in this folder: made when there is none, else the existing one, which is continued."""
    folder = SessionFolder(path.expanduser().absolute())
    if not folder.exists() and folder.path.is_dir() and any(folder.path.iterdir()):
        raise UsageError(
            f"{folder.path} holds other files and no session",
            why="a session has a folder of its own",
            next="name a new or an empty folder",
        )
    paths.make_private(folder.path)
    for part in (folder.runs, folder.reports, folder.server):
        paths.make_private(part)
    if folder.exists():
        folder.read_session_file()
    else:
        content = SessionFile(
            schema=SCHEMA,
            klbench_version=klbench.__version__,
            created_at=time.time(),
            target=dict(target),
            options=dict(options),
        )
        write_atomically(folder.path / "session.json", msgspec.json.encode(content))
    return folder


def new_session_path(label: str) -> Path:
    """A folder under the sessions' root that does not exist yet: `20261129-191730-dense`."""
    root = paths.make_private(paths.home()) and paths.make_private(paths.sessions_root())
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.")[:40] or "session"
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    for number in range(1, 1000):
        path = root / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
    raise UsageError(f"no free name for a session under {root}")


def find_session(name: str) -> SessionFolder:
    """The session that a user names: a folder, or the (beginning of the) name of one under the root."""
    path = Path(name).expanduser()
    if SessionFolder(path).exists():
        return SessionFolder(path.absolute())
    known = all_sessions()
    matches = [folder for folder in known if folder.name == name] or [
        folder for folder in known if folder.name.startswith(name)
    ]
    if len(matches) == 1:
        return matches[0]
    raise UsageError(
        f"{'no' if not matches else 'more than one'} session is named {name!r}",
        why=", ".join(folder.name for folder in matches[:5]) or f"looked in {paths.sessions_root()}",
        next="klbench sessions",
    )


def all_sessions() -> list[SessionFolder]:
    """The sessions under the root, the newest first."""
    try:
        folders = [SessionFolder(path) for path in paths.sessions_root().iterdir()]
    except OSError:
        return []
    return sorted((folder for folder in folders if folder.exists()), key=lambda f: f.name, reverse=True)
