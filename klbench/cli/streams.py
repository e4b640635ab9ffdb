"""The standard streams: data goes to stdout, whole or with an error; nothing else of ours writes there.

Invariants: a command whose stdout is closed is refused before its work, for its answer would be lost; a full
disk behind stdout is an error that a user can act on; a reader that leaves is neither (BrokenPipeError). A
closed stdin or stderr becomes the null device, so that no file of ours gets its number.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO, cast

from klbench.errors import UsageError
from klbench.storage import StorageError, refused_by_disk


def check() -> None:
    """Makes the streams usable. Raises UsageError when there is no stdout."""
    # They are None where the caller closed them, whatever their type says.
    stdin, stdout, stderr = (cast("TextIO | None", stream) for stream in (sys.stdin, sys.stdout, sys.stderr))
    if stdin is None:
        sys.stdin = _null(0, os.O_RDONLY)
    if stderr is None:
        sys.stderr = _null(2, os.O_WRONLY)
    if stdout is None:
        sys.stdout = _null(1, os.O_WRONLY)
        raise UsageError(
            "standard output is closed", why="the answer would be lost", next="send it to a file or /dev/null"
        )


def _null(number: int, flags: int) -> TextIO:
    handle = os.open(os.devnull, flags)
    if handle != number:
        os.dup2(handle, number)
        os.close(handle)
    return cast("TextIO", os.fdopen(number, "r" if flags == os.O_RDONLY else "w", closefd=False))


def write(content: bytes) -> None:
    """Writes data to stdout at once. Raises StorageError where it cannot be written."""
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    except OSError as error:
        raise _refused(error) from error


def flush() -> None:
    """Writes what others (click) left in the buffer. Raises StorageError where it cannot be written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        raise _refused(error) from error


def _refused(error: OSError) -> OSError | StorageError:
    if not refused_by_disk(error):
        return error
    # What is left in the buffer would be tried again when the interpreter ends, with a traceback.
    silence_stdout()
    return StorageError(
        "cannot write to standard output",
        why=error.strerror or str(error),
        next="what was measured is kept: klbench sessions",
    )


def silence_stdout() -> None:
    """Sends what is still to come on stdout to the null device."""
    with contextlib.suppress(OSError, ValueError):
        handle = os.open(os.devnull, os.O_WRONLY)
        os.dup2(handle, sys.stdout.fileno())
        os.close(handle)
