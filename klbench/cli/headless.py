"""`run`, `locate` and `demo` without a terminal: the command is its own runner.

Invariants: the document is written whatever happened, with `error` when something failed and with what there
is; a signal ends the job, then the server, then the command with 128 + its number; nothing of ours is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from klbench.cli import table
from klbench.cli.failures import SIGNALS, Interrupted, note, show, signals_interrupt, write_json
from klbench.cli.progress import Progress
from klbench.errors import ExitCode, KlbenchError, UndecidedError
from klbench.session import documents
from klbench.session.commands import Locate, Run
from klbench.session.folder import SessionFolder, make_session, new_session_path
from klbench.session.link import read_state
from klbench.session.request import StartRequest
from klbench.session.runner import Runner, Session, Work, write_crash
from klbench.session.state import SessionState

MakeWork = Callable[[Session], Work]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a headless command does. `what`: the helpers, then the origin ("locate"), or the origin only where
    a helper diverged ("demo")."""

    what: Literal["run", "locate", "demo"]
    helper: str | None = None
    request: int | None = None


@dataclass(slots=True)
class _Outcome:
    """How the work ended: a signal, an error, both or neither."""

    signum: int | None = None
    error: KlbenchError | None = None
    exit_code: ExitCode | None = None


def execute(
    start: StartRequest, plan: Plan, *, session: Path | None, json_place: str | None, make_work: MakeWork
) -> int:
    """Does it all and returns the exit code. Raises KlbenchError when there is no session to work in."""
    outcome = _Outcome()
    with signals_interrupt():
        target, options = start.as_shown()
        folder = make_session(session or new_session_path(start.target.label), target, options)
        note(f"session {folder.path}")
        try:
            asyncio.run(_work(folder, start, plan, make_work, outcome))
        except KlbenchError as error:
            outcome.error, outcome.exit_code = error, error.exit_code
        except Interrupted as error:
            outcome.signum = error.signum
        # The boundary of the job: a defect still leaves a document and a crash file.
        except Exception as error:
            outcome.error, outcome.exit_code = _as_defect(error, folder), ExitCode.INTERNAL
    if outcome.signum is not None:
        outcome.exit_code = ExitCode(128 + outcome.signum)
        name = signal.Signals(outcome.signum).name
        outcome.error = UndecidedError(f"interrupted by {name}", next="what was measured is in the session")
    return _deliver(folder, plan, outcome, json_place)


async def _work(
    folder: SessionFolder, start: StartRequest, plan: Plan, make_work: MakeWork, outcome: _Outcome
) -> None:
    async with Runner(folder, start, make_work, attended=False, on_entry=Progress()) as runner:
        with _signals_stop(runner, outcome):
            await _follow(plan, runner, start)


async def _follow(plan: Plan, runner: Runner, start: StartRequest) -> None:
    helpers = [plan.helper] if plan.helper else list(start.options.helpers)
    await runner.execute(Run(helpers=helpers))
    run = runner.state.run
    diverged = run is not None and any(helper.status == "diverged" for helper in run.helpers)
    if plan.what != "run" and diverged:
        await runner.execute(Locate(helper=plan.helper, request=plan.request, relaunch=True))


@contextlib.contextmanager
def _signals_stop(runner: Runner, outcome: _Outcome) -> Iterator[None]:
    """Inside, a signal cancels the job; what it has is kept and the server is ended in order."""
    loop = asyncio.get_running_loop()

    def stop(signum: int) -> None:
        outcome.signum = outcome.signum or signum
        runner.stop(f"interrupted by {signal.Signals(signum).name}")
        with contextlib.suppress(KlbenchError):
            runner.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        # Not the default again: a second Ctrl-C must not tear the server's orderly end apart.
        for number in SIGNALS:
            loop.add_signal_handler(number, lambda: None)


def _as_defect(error: Exception, folder: SessionFolder) -> KlbenchError:
    where = write_crash(folder.path, error)
    return KlbenchError(
        f"klbench failed: {type(error).__name__}: {error}",
        why="this is a defect of klbench",
        next=f"please report it with {where}",
    )


def _deliver(folder: SessionFolder, plan: Plan, outcome: _Outcome, json_place: str | None) -> int:
    state = read_state(folder)
    located = state.latest_located if plan.what != "run" else None
    if plan.what == "run":
        document = documents.run_document(folder.path, state, state.run, outcome.error)
    else:
        document = documents.locate_document(folder.path, state, state.run, located, outcome.error)
    if json_place is not None:
        write_json(json_place, document)
    if json_place != "-":
        _print(folder, plan, state, document)
    if outcome.error is not None:
        show(outcome.error)
    if outcome.exit_code is not None:
        return outcome.exit_code
    return _exit_code(plan, state)


def _print(folder: SessionFolder, plan: Plan, state: SessionState, document: dict[str, Any]) -> None:
    run = documents.run_document(folder.path, state, state.run)
    if plan.what != "locate":
        lines = table.run_lines(run)
        for line in lines[:-1] if plan.what == "demo" else lines:
            table.out(line)
    if plan.what == "locate" or (plan.what == "demo" and document["helper"] is not None):
        table.out()
        for line in table.locate_lines(document):
            table.out(line)
    elif plan.what == "demo":
        table.out(f"session: {folder.path}")


def _exit_code(plan: Plan, state: SessionState) -> int:
    run = state.run
    if plan.what == "run":
        return documents.run_exit_code(run) if run is not None else ExitCode.UNDECIDED
    if plan.what == "demo" and run is not None and documents.run_exit_code(run) != ExitCode.DIVERGED:
        return documents.run_exit_code(run)
    return documents.locate_exit_code(run, state.latest_located)
