"""Where klbench keeps things on this system. Standard library only until a folder is asked for.

$KLBENCH_HOME, else the user's state folder     sessions/
runtime folder, else one under the temporary    sockets: network file systems and long paths break them
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from klbench.errors import UsageError

SOCKET_PATH_BYTES = 100
"""Unix sockets take at most 107 bytes of path on Linux and 103 on macOS."""


def home() -> Path:
    """The folder that holds the sessions."""
    if given := os.environ.get("KLBENCH_HOME"):
        return Path(given).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_state_dir("klbench"))


def sessions_root() -> Path:
    return home() / "sessions"


def make_private(folder: Path) -> Path:
    """Makes the folder with mode 0700 and returns it. Raises UsageError when it is not ours alone.

    An existing folder of ours is narrowed; one of somebody else, or a link to one, is refused.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.lstat() if folder.is_symlink() else folder.stat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise UsageError(
                f"{folder} is not a folder of yours",
                why="sessions hold prompts and control a server: only their owner may reach them",
                next="choose another folder with --session DIR or KLBENCH_HOME",
            )
        if status.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise UsageError(
            f"cannot make the folder {folder}",
            why=error.strerror or str(error),
            next="choose another folder with --session DIR or KLBENCH_HOME",
        ) from error
    return folder


def why_not_writable(file: Path) -> str:
    """Why no file can be written to this place that a user named; empty where one can."""
    if file.is_dir():
        return "it is a folder"
    if not file.absolute().parent.is_dir():
        return f"there is no folder {file.absolute().parent}"
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        return "it is not writable"
    return ""


def socket_folder() -> Path:
    """A private folder with a path short enough for sockets in it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    candidates = [Path(runtime) / "klbench"] if runtime and Path(runtime).is_dir() else []
    name = f"klbench-{os.getuid()}"
    candidates += [Path(tempfile.gettempdir()) / name, Path("/tmp") / name]
    why = ""
    for candidate in candidates:
        if len(os.fsencode(candidate)) + 20 > SOCKET_PATH_BYTES:
            continue
        try:
            return make_private(candidate)
        except UsageError as error:
            why = f"{error.what}: {error.why}"
    raise UsageError("no folder for the runner's socket", why=why, next="set TMPDIR to a folder of yours")
