"""What a failure leaves: an event for the user, and for a defect a file to report it with."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path

import klbench
from klbench.errors import ExitCode, KlbenchError
from klbench.session import events as ev
from klbench.session.folder import SessionFolder
from klbench.storage import refused_by_disk, storage_error


def trouble(error: BaseException, folder: SessionFolder) -> ev.Trouble:
    """What a user is told of an error."""
    known = as_known(error, folder.path)
    return ev.Trouble(level="error", what=known.what, why=known.why, next=known.next)


def as_known(error: BaseException, folder: Path) -> KlbenchError:
    """The error that a user is told. A disk that refuses is the user's to mend; everything else is a defect,
    kept in a crash file."""
    if isinstance(error, KlbenchError):
        return error
    if isinstance(error, OSError) and refused_by_disk(error):
        return storage_error(error, folder)
    file = write_crash(folder, error)
    return Defect(
        f"klbench failed: {type(error).__name__}: {error}",
        why="this is a defect of klbench",
        next=f"please report it with {file}" if file is not None else "please report it",
    )


class Defect(KlbenchError):
    """A defect of klbench."""

    exit_code = ExitCode.INTERNAL


def write_crash(folder: Path, error: BaseException) -> Path | None:
    """Keeps the traceback (without values of variables, which may be prompts or keys) and names its file;
    None where it cannot be written."""
    file = folder / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    lines = traceback.format_exception(error)
    try:
        file.write_text(f"klbench {klbench.__version__}\n{''.join(lines)}", encoding="utf-8")
        file.chmod(0o600)
    except OSError:
        return None
    return file
