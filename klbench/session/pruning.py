"""Freeing the space of ended sessions: their traces first, whole sessions only where asked.

Invariants: a session is removed from while its lock is held, so no runner works on it; nothing outside of the
session's folder is touched, and no link is followed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from klbench.errors import KlbenchError, UsageError
from klbench.session.folder import SessionFolder, all_sessions
from klbench.session.reading import find_runner
from klbench.session.size import size_bytes

_DAY_S = 86400.0
_LEFTOVERS = ("traces",)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A session that something can be removed of, and how much."""

    folder: SessionFolder
    size_bytes: int


def candidates(
    folders: Sequence[SessionFolder] | None, *, older_than_days: float | None, whole: bool
) -> tuple[list[Candidate], list[tuple[SessionFolder, str]]]:
    """What can be removed, and the sessions that are left alone with the reason. None for all sessions."""
    if whole and folders is None and older_than_days is None:
        raise UsageError(
            "which sessions?",
            why="--whole removes everything that was measured",
            next="name sessions, or their age with --older-than DAYS",
        )
    found: list[Candidate] = []
    left_alone: list[tuple[SessionFolder, str]] = []
    for folder in all_sessions() if folders is None else folders:
        if older_than_days is not None and _age_s(folder) < older_than_days * _DAY_S:
            continue
        if (lock := find_runner(folder)) is not None:
            left_alone.append((folder, f"{lock.where} works on it"))
            continue
        places = [folder.path] if whole else [folder.path / name for name in _LEFTOVERS]
        amount = sum(size_bytes(place) for place in places)
        if amount:
            found.append(Candidate(folder, amount))
    return found, left_alone


def remove(candidate: Candidate, *, whole: bool) -> None:
    """Removes the traces, or the session. Raises KlbenchError when a runner took it meanwhile."""
    folder = candidate.folder
    with folder.locked():
        for name in _LEFTOVERS:
            _remove_tree(folder.path / name)
        if whole:
            for entry in folder.path.iterdir():
                # The description goes last: a removal that was interrupted still looks like a session.
                if entry.name not in ("session.json", "lock", "lock.guard"):
                    _remove_tree(entry)
    if whole:
        _remove_tree(folder.path)


def _remove_tree(path: Path) -> None:
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
    except OSError as error:
        raise KlbenchError(f"cannot remove {path}", why=error.strerror or str(error)) from error


def _age_s(folder: SessionFolder) -> float:
    """Since the session's last event."""
    with contextlib.suppress(OSError):
        return time.time() - os.stat(folder.events).st_mtime
    return time.time() - os.stat(folder.path).st_mtime
