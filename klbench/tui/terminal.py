"""Running the workbench in a terminal: what kind of terminal it is, and what is left behind in it.

Invariants: the terminal is restored however the workbench ends; a crash prints no values of variables and
says where the session is.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from klbench import paths
from klbench.errors import ExitCode, KlbenchError
from klbench.session.folder import SessionFolder
from klbench.session.reading import find_runner
from klbench.session.request import start_from_dict
from klbench.settings import Settings, load
from klbench.tui import slow_link
from klbench.tui.app import WorkbenchApp
from klbench.tui.hangup import ends_with_terminal


def run_workbench(
    *, session: Path | None, start: dict[str, Any] | None, readonly: bool, settings: Settings | None = None
) -> int:
    """Run the workbench in this terminal until the user leaves; returns the exit code.

    `session` is a folder to open; `start` is {"target": ..., "options": ...} to start a new one with.
    Raises KlbenchError where `start` cannot be understood.
    """
    request = start_from_dict(start) if start is not None else None
    settings = load() if settings is None else settings
    slow = bool(settings["workbench.slow_link"])
    for size in ("COLUMNS", "LINES"):
        # Exported by some parent, they would hold the first size for good, here and in a pager.
        os.environ.pop(size, None)
    with _drawing_on_the_terminal():
        advice = "" if slow else slow_link.advice(os.environ)
        app = WorkbenchApp(
            session=session, start=request, readonly=readonly, settings=settings, advice=advice
        )
        return _run(app)


@contextlib.contextmanager
def _drawing_on_the_terminal() -> Iterator[None]:
    """Textual draws on stderr; where that goes elsewhere (`2>file`), have it draw on stdout instead."""
    before = sys.__stderr__
    if before is None or not before.isatty():
        sys.__stderr__ = sys.__stdout__  # type: ignore[misc]
    try:
        yield
    finally:
        sys.__stderr__ = before  # type: ignore[misc]


def _run(app: WorkbenchApp) -> int:
    try:
        with ends_with_terminal():
            app.run(mouse=app.look.mouse)
    except OSError:
        # The terminal is gone: there is nothing to restore and nobody to tell. The runner goes on.
        return int(ExitCode.HUNG_UP)
    with contextlib.suppress(OSError):
        _say_goodbye(app)
    return app.return_code if app.return_code is not None else 0


def _say_goodbye(app: WorkbenchApp) -> None:
    folder = app.model.folder
    if app.crash:
        file = _keep_crash(app.crash, folder)
        print("klbench: the screen failed; this is a defect of klbench, your work goes on.", file=sys.stderr)
        print(f"  details: {file}" if file else app.crash, file=sys.stderr)
    if folder is not None and folder.exists():
        running = find_runner(folder) is not None
        state = "still runs" if running else "is kept"
        print(f"The session {state}: klbench open {folder.name}", file=sys.stderr)


def _keep_crash(crash: str, folder: SessionFolder | None) -> Path | None:
    """The traceback in the session's folder (or the state folder), readable by its owner only; None where it
    cannot be written."""
    try:
        place = folder.path if folder is not None else paths.make_private(paths.home())
        file = place / f"crash-workbench-{os.getpid()}.txt"
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as output:
            output.write(crash)
    except (OSError, KlbenchError):
        return None
    return file
