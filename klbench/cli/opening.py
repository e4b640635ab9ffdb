"""`klbench open`: attach to a runner, read an ended session or a bundle, or continue an interrupted one."""

from __future__ import annotations

import click

from klbench.cli import commands
from klbench.cli.failures import note, write_json
from klbench.core.text import visible
from klbench.errors import ExitCode, KlbenchError, UsageError
from klbench.session.bundle import find_session_or_bundle, is_unpacked, read_with_care
from klbench.session.folder import SessionFolder, all_sessions
from klbench.session.interruption import interrupted, start_to_continue
from klbench.session.reading import find_runner, read_state


def open_session(name: str | None, *, go_on: bool, json_place: str | None) -> int:
    """Does what `klbench open` was asked for and returns the exit code."""
    folder = _named(name)
    has_terminal = commands.has_terminal() and json_place is None
    if folder is None:
        if not has_terminal:
            if go_on or json_place is not None:
                raise UsageError("which session?", next="klbench sessions lists them")
            from klbench.cli import listing

            return listing.list_all(None)
        return commands.workbench(session=None, start=None)
    folder.read_session_file()
    unpacked = is_unpacked(folder)
    if go_on and unpacked:
        raise UsageError("a bundle can only be read", next="continue the session that it was made of")
    if not has_terminal:
        return _continue_headless(folder, json_place) if go_on else _print_with_care(folder, json_place)
    lock = find_runner(folder)
    if lock is None and not unpacked and (go_on or _wanted(folder)):
        # Heavy: what reads a session does without.
        import asyncio

        from klbench.session.link import continue_session

        note(asyncio.run(continue_session(folder)))
        lock = find_runner(folder)
    only_read = unpacked or (lock is not None and not lock.local)
    return commands.workbench(session=folder.path, start=None, readonly=only_read)


def _named(name: str | None) -> SessionFolder | None:
    if name is not None:
        return find_session_or_bundle(name)
    live = [known for known in all_sessions() if _is_live_here(known)]
    return live[0] if len(live) == 1 else None


def _is_live_here(folder: SessionFolder) -> bool:
    lock = folder.read_lock()
    return lock is not None and lock.local and lock.alive


def _wanted(folder: SessionFolder) -> bool:
    """Whether the user wants an interrupted run continued; not asked where it cannot be."""
    state = read_state(folder)
    found = interrupted(state)
    if found is None:
        return False
    try:
        start_to_continue(folder, state)
    except KlbenchError as error:
        note(f"{found.in_words} · {error.what}: {error.why}")
        return False
    took = state.runs[-1].server.launch_s if state.runs[-1].server is not None else None
    cost = f" (about {took:.0f} s)" if took else ""
    question = f"{visible(found.in_words)}. Start its server again{cost} and continue?"
    return click.confirm(question, default=False, err=True)


def _continue_headless(folder: SessionFolder, json_place: str | None) -> int:
    from klbench.cli import headless
    from klbench.session.bench import make_work

    state = read_state(folder)
    found = interrupted(state)
    if found is None:
        raise UsageError(
            f"no run of {folder.name} was interrupted", next=f"klbench run --like {folder.path} repeats it"
        )
    return headless.execute(
        start_to_continue(folder, state),
        headless.Plan("run"),
        session=folder.path,
        json_place=json_place,
        make_work=make_work,
    )


def _print_with_care(folder: SessionFolder, json_place: str | None) -> int:
    with read_with_care(folder):
        return _print(folder, json_place)


def _print(folder: SessionFolder, json_place: str | None) -> int:
    from klbench.cli import table
    from klbench.session import documents

    state = read_state(folder)
    if state.damage.count:
        note(state.damage.in_words)
    run = documents.run_document(folder.path, state, state.run)
    if json_place is not None:
        write_json(json_place, run)
    if json_place == "-":
        return ExitCode.CONSISTENT
    for line in table.run_lines(run):
        table.out(line)
    if state.located_now is not None:
        document = documents.locate_document(folder.path, state, state.run, state.located_now)
        for line in ["", *table.locate_lines(document)[:-2]]:
            table.out(line)
    if (lock := find_runner(folder)) is not None:
        table.out(f"running: {lock.where}")
    elif (found := interrupted(state)) is not None:
        table.out(f"{found.in_words} · continue it: klbench open --continue {folder.path}")
    return ExitCode.CONSISTENT
