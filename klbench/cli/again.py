"""`klbench run` on a session that is there: continue it, repeat it, or do the same anew and compare."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from klbench.cli import headless
from klbench.cli.failures import note
from klbench.errors import UsageError
from klbench.session.bench import make_work
from klbench.session.bundle import find_session_or_bundle, is_unpacked
from klbench.session.folder import SessionFolder
from klbench.session.interruption import start_to_continue
from klbench.session.liking import check_then, start_like
from klbench.session.reading import read_state

# What may be said anew: none of it changes a number.
_FREE = frozenset(
    {
        "session", "like", "same_verdict", "json_place", "notify", "keep_idle", "yes_flush", "yes_capture",
        "launch_timeout",
    }
)  # fmt: skip


def _check_options(instead: str) -> None:
    """Raises UsageError where this command line says something that the recorded one decides."""
    context = click.get_current_context()
    given = [
        name
        for name in context.params
        if name not in _FREE and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        flags = ", ".join(f"--{name.removesuffix('s') if name == 'helpers' else name}" for name in given)
        raise UsageError(
            f"{flags.replace('_', '-')} would make it another experiment",
            why="the session's own command is repeated, so that the numbers can be compared",
            next=instead,
        )


def is_session(path: Path) -> bool:
    return SessionFolder(path).exists()


def run_again(session: Path, *, json_place: str | None) -> int:
    """What the session was made for: the interrupted run goes on, otherwise the same run once more."""
    _check_options("name the target too for a new run in this session: --demo, --launch or --url")
    folder = SessionFolder(session.absolute())
    folder.read_session_file()
    if is_unpacked(folder):
        raise UsageError("a bundle can only be read", next=f"klbench run --like {session} repeats its run")
    start = start_to_continue(folder, read_state(folder))
    return headless.execute(
        start, headless.Plan("run"), session=session, json_place=json_place, make_work=make_work
    )


def run_like(
    name: str,
    *,
    session: Path | None,
    json_place: str | None,
    options: Mapping[str, Any],
    same_verdict: bool = False,
) -> int:
    """Repeats the named session in a new one and compares. Only options that change no number are taken
    from this command line. With `same_verdict` the exit code says whether the verdict is that of then."""
    _check_options("start a new run with --demo, --launch or --url")
    folder = find_session_or_bundle(name)
    folder.read_session_file()
    start, side = start_like(folder)
    check_then(side, verdict=same_verdict)
    ours = msgspec.structs.replace(
        start.options,
        yes_flush=options["yes_flush"] or start.options.yes_flush,
        yes_capture=options["yes_capture"] or start.options.yes_capture,
        notify=options["notify"],
        keep_idle_s=options["keep_idle"],
        launch_timeout_s=options["launch_timeout"],
    )
    start = msgspec.structs.replace(start, options=ours)
    note(f"like {folder.path} · run {side.run.number}")
    plan = headless.Plan("run", like=side, same_verdict=same_verdict)
    return headless.execute(start, plan, session=session, json_place=json_place, make_work=make_work)
