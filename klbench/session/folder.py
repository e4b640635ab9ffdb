"""The folder of a session: what lies where, who may work in it.

<session>/                 0700
    session.json           schema, version, created, target, options: written once, atomically
    events.jsonl           the event log (log.py)
    lock                   the runner at work: host, pid, its start, its socket (lock.py)
    runs/ traces/ reports/ columns, traces, reports
    exports/               exported operators
    calls/ pictures/       bodies of calls that are too long for a line; screens as SVG
    server/                the server's logs and control folder
    runner.log             what a detached runner and its libraries print
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
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
from klbench.session.lock import Lock, held, read_lock
from klbench.storage import file_inside, read_small


class SessionFile(msgspec.Struct, frozen=True, kw_only=True):
    """session.json."""

    schema: str
    klbench_version: str
    created_at: float
    target: dict[str, Any] = {}
    options: dict[str, Any] = {}


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
        """The file that an event names, the only way from a name in a log to a file. Raises UsageError for
        one that leaves the session, whose own server's log lies in it too, and for a pipe or a device."""
        return file_inside(self.path, name)

    def read_session_file(self) -> SessionFile:
        """session.json; raises UsageError when this is no session or one of a version unknown to us."""
        file = self.path / "session.json"
        try:
            content = msgspec.json.decode(read_small(file), type=SessionFile)
        except FileNotFoundError as error:
            raise UsageError(f"{self.path} is not a klbench session", next="klbench sessions") from error
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(
                f"cannot read {file}",
                why=str(error),
                next="it is damaged, or not klbench's; what was measured lies in events.jsonl and runs/",
            ) from error
        if content.schema != SCHEMA:
            raise UsageError(
                f"{self.path} has the format {content.schema!r}; this klbench reads {SCHEMA!r}",
                why=f"klbench {content.klbench_version} wrote it",
                next="open it with that version",
            )
        return content

    def read_lock(self) -> Lock | None:
        """The lock, or None when there is none or it cannot be understood."""
        return read_lock(self.lock_file)

    @contextlib.contextmanager
    def locked(self, *, socket: str = "") -> Iterator[Lock]:
        """Holds the session's lock. Raises UsageError when a runner works in the folder already."""
        with held(self.lock_file, socket=socket) as lock:
            yield lock


def write_atomically(file: Path, content: bytes, *, durable: bool = True) -> None:
    """Readers see the old file or the new one, whole; mode 0600. Raises OSError that names the file.

    What is not `durable` may be lost with the machine's power, and costs no wait for the disk.
    """
    draft = None
    try:
        handle, draft = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
        with os.fdopen(handle, "wb") as output:
            output.write(content)
            output.flush()
            if durable:
                os.fsync(output.fileno())
        os.replace(draft, file)
    except BaseException as error:
        if draft is not None:
            with contextlib.suppress(OSError):
                os.unlink(draft)
        if isinstance(error, OSError) and error.errno is not None:
            # A write says only "no space left", not where, and a draft's name helps nobody.
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise


def check_writable_place(file: Path) -> None:
    """Raises UsageError where no file can be written to a place that a user named."""
    if why := paths.why_not_writable(file):
        raise UsageError(f"cannot write {file}", why=why, next="name a file in a folder that is there")


def write_where_asked(file: Path, content: bytes) -> None:
    """Writes to a place that a user named: a regular file atomically, through links; a device or a pipe as it
    is, never in its place. Raises UsageError where nothing can be written, OSError where the disk refuses."""
    check_writable_place(file)
    target = file.resolve()
    if target.exists() and not target.is_file():
        with file.open("wb") as output:
            output.write(content)
        return
    write_atomically(target, content)


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
    if folder.exists():
        folder.read_session_file()
    for part in (folder.runs, folder.reports, folder.server):
        paths.make_private(part)
    if not folder.exists():
        content = SessionFile(
            schema=SCHEMA,
            klbench_version=klbench.__version__,
            created_at=time.time(),
            target=dict(target),
            options=dict(options),
        )
        try:
            write_atomically(folder.path / "session.json", msgspec.json.encode(content))
        except OSError:
            remove_new(folder)
            raise
    return folder


def remove_new(folder: SessionFolder) -> None:
    """Takes back a session that was just made and holds nothing yet."""
    shutil.rmtree(folder.path, ignore_errors=True)


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
    if not name.strip():
        # Every name begins with nothing: a script whose variable is empty would work on some session.
        raise UsageError(
            "the session's name is empty",
            why="a variable of a script may not be set",
            next="klbench sessions",
        )
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
    """The sessions under the root, the newest first. Raises UsageError where it cannot be read."""
    try:
        folders = [SessionFolder(path) for path in paths.sessions_root().iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(
            f"cannot list the sessions in {paths.sessions_root()}",
            why=error.strerror or str(error),
            next="name a folder of yours with KLBENCH_HOME",
        ) from error
    return sorted((folder for folder in folders if folder.exists()), key=lambda f: f.name, reverse=True)
