"""What a failure leaves: an event for the user, and for a defect a file to report it with."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from pathlib import Path

import klbench
from klbench.errors import KlbenchError
from klbench.session import events as ev
from klbench.session.folder import SessionFolder


def trouble(error: BaseException, folder: SessionFolder) -> ev.Trouble:
    """What a user is told of an error; a defect is kept in a crash file."""
    if isinstance(error, KlbenchError):
        return ev.Trouble(level="error", what=error.what, why=error.why, next=error.next)
    file = write_crash(folder.path, error)
    return ev.Trouble(
        level="error",
        what=f"klbench failed: {type(error).__name__}: {error}",
        why="this is a defect of klbench",
        next=f"please report it with {file}",
    )


def write_crash(folder: Path, error: BaseException) -> Path:
    """Keeps the traceback (without values of variables, which may be prompts or keys) and names its file."""
    file = folder / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    lines = traceback.format_exception(error)
    with contextlib.suppress(OSError):
        file.write_text(f"klbench {klbench.__version__}\n{''.join(lines)}", encoding="utf-8")
        file.chmod(0o600)
    return file
