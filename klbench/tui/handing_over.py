"""A session's texts in the user's own programs: $PAGER to read, $VISUAL or $EDITOR to edit.

    V on the log's screen        the server's log in less, as a copy without control sequences
    after the program's end      the workbench as it was, with what went on meanwhile

Invariants: a pager gets no character of a server that a terminal would obey, it reads a copy in which they
are spelled out; copies lie in a private folder and end with the program; only the newest report of a session
that may be changed is edited in place; no name in the session's log leads out of the session. While the
program runs, the workbench draws nothing and goes on following.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textual.app import App, SuspendNotSupported

from klbench.core.text import size
from klbench.errors import KlbenchError, UndecidedError, UsageError
from klbench.session import events as ev
from klbench.session.folder import SessionFolder
from klbench.session.log import each_entry
from klbench.storage import open_regular
from klbench.tui.model import Model
from klbench.tui.server_log import clean_line

MOST_COPIED_BYTES = 256 * 1024 * 1024
"""Of a server's log, from its end: making it readable takes about a second per 100 MB."""
_PIECE_BYTES = 1024 * 1024
"""A line that is longer is copied in pieces."""
_END_S = 3.0
"""How long a program may take to end when the workbench has to."""
_NOTHING_SEEN_S = 1.0

PAGERS, EDITORS = (("PAGER",), ("less", "more")), (("VISUAL", "EDITOR"), ("vi", "nano"))
"""The variables that name the program, and what is looked for where none is set."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text of the session that another program can show."""

    name: str
    """log, commands, report or body."""
    title: str
    file: Path
    """Where it lies; of the commands, the event log that they are taken from."""


def documents(model: Model, place: str, call: str = "") -> list[Document]:
    """What there is to open, first what screen `place` is about; `call` is the command under the cursor."""
    folder, state = model.folder, model.state
    if folder is None:
        return []
    kept = re.search(r"\bcalls/[0-9a-f]{16}\.json", call)
    reports = [name for name in state.reports if name.endswith(".md")]
    named = [
        ("body", "the body of this call", [kept[0]] if kept is not None else []),
        ("log", "the server's log", [state.server.log] if state.server.log else []),
        ("commands", "the command log", [folder.events.name] if state.calls else []),
        ("report", "the newest report", reports),
    ]
    found = [
        Document(name, title, file)
        for name, title, files in named
        if (file := _newest(folder, files)) is not None
    ]
    first = place if place in ("log", "commands") else "report"
    return sorted(found, key=lambda document: (document.name != "body", document.name != first))


def _newest(folder: SessionFolder, names: Sequence[str]) -> Path | None:
    """The last of the files that lies in the session."""
    for name in reversed(names):
        with contextlib.suppress(UsageError):
            return folder.resolve(name)
    return None


def program(kind: str, environment: Mapping[str, str]) -> list[str]:
    """The user's pager or editor ("pager", "editor") as words of a command. Raises UsageError where what the
    variable says is no command, and where there is none."""
    variables, usual = PAGERS if kind == "pager" else EDITORS
    name = next((name for name in variables if environment.get(name, "").strip()), "")
    hint = f"export {variables[-1]}={usual[0]} before klbench is started"
    if not name:
        known = next((word for word in usual if shutil.which(word, path=environment.get("PATH"))), None)
        if known is None:
            raise UsageError(f"there is no {kind}: {' and '.join(usual)} are not installed", next=hint)
        return [known]
    try:
        words = shlex.split(environment[name])
    except ValueError as error:
        raise UsageError(f"${name} is no command: {environment[name]!r}", why=str(error), next=hint) from None
    if not words or shutil.which(words[0], path=environment.get("PATH")) is None:
        raise UsageError(f"there is no program {(words or [''])[0]!r}", why=f"${name} names it", next=hint)
    return words


def shown_program(kind: str, environment: Mapping[str, str]) -> str:
    """The name of the program, or of the variable that should say it."""
    try:
        return Path(program(kind, environment)[0]).name
    except UsageError:
        return f"${(PAGERS if kind == 'pager' else EDITORS)[0][-1]}"


def write_copy(document: Document, folder: Path, draw: Callable[[str], str] = str) -> Path:
    """A copy of the document in `folder` that a terminal can be shown; `draw` has the last word on a line."""
    ending = ".md" if document.name == "report" else ".txt"
    copy = folder / f"{document.name}{ending}"
    with open(copy, "w", encoding="utf-8", errors="replace") as output:
        for line in _lines(document):
            output.write(draw(line) + "\n")
    copy.chmod(0o400)
    return copy


def _lines(document: Document) -> Iterator[str]:
    if document.name == "commands":
        yield from _calls(document.file)
        return
    with open_regular(document.file) as file:
        ends_at = os.fstat(file.fileno()).st_size
        skipped = max(ends_at - MOST_COPIED_BYTES, 0)
        if skipped:
            yield f"[the first {size(skipped)} are left out: {document.file} has them]"
            file.seek(skipped)
            file.readline(_PIECE_BYTES)
        # No further than it was: a server that goes on writing has no end.
        while file.tell() < ends_at and (piece := file.readline(_PIECE_BYTES)):
            yield clean_line(piece.decode("utf-8", errors="replace").rstrip("\n"), most=None)


def _calls(events: Path) -> Iterator[str]:
    """Every call of the session, one that can be pasted into a shell below a comment."""
    for entry in each_entry(events):
        if isinstance(call := entry.event, ev.Call):
            at = time.strftime("%H:%M:%S", time.localtime(entry.at))
            yield clean_line(f"# {at} · {call.elapsed_s:.2f} s · {call.outcome}", most=None)
            yield clean_line(call.line, most=None)


async def hand_over(app: App[Any], command: list[str]) -> str:
    """Gives the terminal to `command` until it ends; returns what is to be said of it, mostly nothing.

    Raises UndecidedError where the terminal cannot be given away or the program does not start. A
    cancellation ends the program; the terminal then stays as it was before the workbench.
    """
    name = Path(command[0]).name
    failed: OSError | None = None
    try:
        with _deaf_to_keys(), app.batch_update(), app.suspend():
            began = time.monotonic()  # changing hands is not the program's time
            try:
                code = await _run(command)
            except OSError as error:  # raised on, it would leave the workbench without its terminal
                failed = error
            took_s = time.monotonic() - began
    except SuspendNotSupported as error:
        raise UndecidedError(
            "this terminal cannot be given to another program",
            why="the workbench runs in a browser or without a terminal",
            next="open the file itself: its folder is the session's",
        ) from error
    if failed is not None:
        raise UndecidedError(f"{name} cannot be started", why=failed.strerror or str(failed)) from failed
    if code < 0:
        return f"{name} was ended by {signal.Signals(-code).name}"
    if code:
        return f"{name} ended with exit code {code}"
    if took_s < _NOTHING_SEEN_S:
        return f"{name} ended at once; one that waits for a key shows more: export PAGER=less"
    return ""


async def _run(command: list[str]) -> int:
    process = await asyncio.create_subprocess_exec(*command, env=_for_program(os.environ))
    try:
        return await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
        raise


def _for_program(environment: Mapping[str, str]) -> dict[str, str]:
    """Its environment: a less that leaves at once when the text is short would show nothing."""
    options = environment.get("LESS", "")
    return {**environment, "LESS": f"{options} -+F -+E -+e".strip()}


@contextlib.contextmanager
def _deaf_to_keys() -> Iterator[None]:
    """ctrl+c and ctrl+\\ are meant for the program in front, and reach this process too. Not SIG_IGN, which
    the program would inherit."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def failure(error: Exception) -> KlbenchError:
    """What a text that cannot be read or copied is to the user."""
    if isinstance(error, KlbenchError):
        return error
    why = getattr(error, "strerror", None) or str(error)
    return UndecidedError("the text cannot be opened", why=f"{why}: {getattr(error, 'filename', '') or ''}")
