"""`run`, `locate`, `demo` and `census` without a terminal: the command is its own runner.

Invariants: the document is written whatever happened, with `error` when something failed and with what there
is; a signal ends the job, then the server, then the command with 128 + its number; nothing of ours is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from klbench.cli import calibrate, census, compare_table, experiment, table
from klbench.cli.failures import Interrupted, SignalSwitch, note, ring, show, signals_switched, write_json
from klbench.cli.progress import progress
from klbench.errors import ExitCode, KlbenchError, UndecidedError, UsageError
from klbench.session import documents
from klbench.session.calibrating import calibration_document, calibration_exit_code, keep_calibration
from klbench.session.census import census_document, census_exit_code
from klbench.session.commands import Census, Continue, Experiment, Locate, Run
from klbench.session.comparing import Side, compare, side_of
from klbench.session.continuing import continues
from klbench.session.crash import as_known
from klbench.session.experimenting import experiment_document, experiment_exit_code
from klbench.session.folder import SessionFolder, make_session, new_session_path, remove_new
from klbench.session.interruption import interrupted
from klbench.session.liking import verdict_changes
from klbench.session.reading import find_runner, read_state
from klbench.session.request import StartRequest
from klbench.session.runner import Runner, Session, Work
from klbench.session.state import SessionState

MakeWork = Callable[[Session], Work]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a headless command does. `what`: the helpers, then the origin ("locate"), or the origin only where
    a helper diverged ("demo"), or experiments ("experiment"); or the census alone."""

    what: Literal["run", "locate", "demo", "census", "experiment", "calibrate"]
    helper: str | None = None
    request: int | None = None
    like: Side | None = None
    """What was measured before, to show beside what is measured now."""
    same_verdict: bool = False
    """The exit code says whether the verdict is the one of `like`."""
    resumes: bool = False
    """Continue the session's interrupted run; set by `execute`."""
    show_all: bool = False
    """Print also what is as it should be."""
    experiments: tuple[str, ...] = ()
    max_relaunches: int | None = None
    passes: int = 1
    """How often the helpers are run."""


@dataclass(slots=True)
class _Outcome:
    """How the work ended: a signal, an error, both or neither."""

    made: bool
    """The session was made for this command."""
    signum: int | None = None
    error: KlbenchError | None = None
    exit_code: ExitCode | None = None


def execute(
    start: StartRequest, plan: Plan, *, session: Path | None, json_place: str | None, make_work: MakeWork
) -> int:
    """Does it all and returns the exit code. Raises KlbenchError when there is no session to work in."""
    outcome = _Outcome(made=session is None or not SessionFolder(session.absolute()).exists())
    with signals_switched() as switch:
        target, options = start.as_shown()
        folder = make_session(session or new_session_path(start.target.label), target, options)
        note(f"session {folder.path}", type="session", session=str(folder.path))
        plan = replace(plan, resumes=plan.what != "census" and _resumes(folder, start))
        try:
            asyncio.run(_work(folder, start, plan, make_work, outcome, switch))
        except KlbenchError as error:
            outcome.error, outcome.exit_code = error, error.exit_code
        except Interrupted as error:
            outcome.signum = error.signum
        # The boundary of the job: a defect still leaves a document and a crash file.
        except Exception as error:
            outcome.error = as_known(error, folder.path)
            outcome.exit_code = outcome.error.exit_code
        # What was measured is delivered whole: a signal that comes now changes nothing of it.
        switch.hold_once()
        code = _finish(folder, plan, outcome, json_place)
        if start.options.notify:
            ring(f"klbench: done with exit code {int(code)}")
        return code


def _resumes(folder: SessionFolder, start: StartRequest) -> bool:
    """Whether the session has an interrupted run that is this very experiment; says so on stderr."""
    if not folder.events.exists() or find_runner(folder) is not None:
        return False
    state = read_state(folder)
    found = interrupted(state)
    if found is None:
        return False
    if (other := continues(start, found, state)) is not None:
        note(f"{found.in_words} · not continued, for this is another experiment: {other} differ")
        return False
    note(f"{found.in_words} · continued")
    return True


def _finish(folder: SessionFolder, plan: Plan, outcome: _Outcome, json_place: str | None) -> int:
    if outcome.signum is not None:
        outcome.exit_code = ExitCode(128 + outcome.signum)
        name = signal.Signals(outcome.signum).name
        outcome.error = UndecidedError(f"interrupted by {name}", next="what was measured is in the session")
    return _deliver(folder, plan, outcome, json_place)


async def _work(
    folder: SessionFolder,
    start: StartRequest,
    plan: Plan,
    make_work: MakeWork,
    outcome: _Outcome,
    switch: SignalSwitch,
) -> None:
    async with Runner(folder, start, make_work, attended=False, on_entry=progress()) as runner:
        with _signals_stop(runner, outcome, switch):
            await _follow(plan, runner, start)


async def _follow(plan: Plan, runner: Runner, start: StartRequest) -> None:
    if plan.what == "census":
        await runner.execute(Census(relaunch=True))
        return
    helpers = [plan.helper] if plan.helper else list(start.options.helpers)
    # Not a second time: what the runner found when it took the session is what is left.
    await runner.execute(Continue() if plan.resumes else Run(helpers=helpers))
    for _ in range(1, plan.passes):
        await runner.execute(Run(helpers=helpers))
    run = runner.state.run
    if plan.what == "calibrate":
        return
    if plan.what == "experiment":
        names = list(plan.experiments)
        await runner.execute(Experiment(names=names, helper=plan.helper, max_relaunches=plan.max_relaunches))
        return
    diverged = run is not None and any(helper.status == "diverged" for helper in run.helpers)
    if plan.what != "run" and diverged:
        await runner.execute(Locate(helper=plan.helper, request=plan.request, relaunch=True))


@contextlib.contextmanager
def _signals_stop(runner: Runner, outcome: _Outcome, switch: SignalSwitch) -> Iterator[None]:
    """Inside, a signal cancels the job; what it has is kept and the server is ended in order."""
    loop = asyncio.get_running_loop()

    def stop(signum: int) -> None:
        outcome.signum = outcome.signum or signum
        runner.stop(f"interrupted by {signal.Signals(signum).name}")
        with contextlib.suppress(KlbenchError):
            runner.cancel()

    # Not the loop's own handlers: with the loop's end they give way to the default, which kills.
    switch.react = lambda signum: _soon(loop, stop, signum)
    try:
        yield
    finally:
        # A second Ctrl-C must not tear the server's orderly end apart.
        switch.react = lambda _: None


def _soon(loop: asyncio.AbstractEventLoop, stop: Callable[[int], None], signum: int) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(stop, signum)


def _take_back(folder: SessionFolder, error: UsageError, json_place: str | None) -> int:
    """A command that was wrong before anything began leaves no session behind."""
    remove_new(folder)
    if json_place is not None:
        write_json(json_place, {"session": None, "error": error.as_dict()})
    note(f"nothing was begun: {folder.path} is taken back")
    show(error)
    return error.exit_code


def _deliver(folder: SessionFolder, plan: Plan, outcome: _Outcome, json_place: str | None) -> int:
    state = read_state(folder)
    if outcome.made and isinstance(outcome.error, UsageError) and not state.begun:
        return _take_back(folder, outcome.error, json_place)
    located = state.located_now if plan.what != "run" else None
    if plan.what == "census":
        document = census_document(folder.path, state, outcome.error)
    elif plan.what == "experiment":
        document = experiment_document(folder.path, state, outcome.error)
    elif plan.what == "calibrate":
        document = calibration_document(folder.path, state, plan.passes, outcome.error)
        if outcome.error is None and calibration_exit_code(document) != ExitCode.UNDECIDED:
            document["kept_in"] = str(keep_calibration(document, state.at))
    elif plan.what == "run":
        document = documents.run_document(folder.path, state, state.run, outcome.error)
    else:
        document = documents.locate_document(folder.path, state, state.run, located, outcome.error)
    if plan.like is not None and outcome.error is None:
        try:
            document["compare"] = asyncio.run(compare(plan.like, side_of(folder, state), anyway=True))
            if plan.same_verdict:
                changes = verdict_changes(plan.like, side_of(folder, state))
                document["same_verdict"] = {"same": not changes, "changes": changes}
        except KlbenchError as error:
            document["compare"] = {"error": error.as_dict()}
            show(error)
    if json_place is not None:
        write_json(json_place, document)
    if json_place != "-":
        _print(folder, plan, state, document)
        if "helpers" in document.get("compare", {}):
            table.out()
            for line in compare_table.lines(document["compare"]):
                table.out(line)
        if (judged := document.get("same_verdict")) is not None:
            table.out("the same verdict as then" if judged["same"] else "another verdict than then")
            for change in judged["changes"]:
                table.out(f"  {change}")
    if outcome.error is not None:
        show(outcome.error)
    if outcome.exit_code is not None:
        return outcome.exit_code
    if plan.what == "calibrate":
        return calibration_exit_code(document)
    if plan.same_verdict:
        judged = document.get("same_verdict", {"same": None})["same"]
        return {True: ExitCode.CONSISTENT, False: ExitCode.DIVERGED, None: ExitCode.UNDECIDED}[judged]
    return _exit_code(plan, state)


def _print(folder: SessionFolder, plan: Plan, state: SessionState, document: dict[str, Any]) -> None:
    if plan.what == "census":
        for line in census.lines(document, show_all=plan.show_all):
            table.out(line)
        return
    if plan.what == "experiment":
        for line in experiment.lines(document):
            table.out(line)
        return
    if plan.what == "calibrate":
        for line in calibrate.lines(document):
            table.out(line)
        return
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
    if plan.what == "census":
        return census_exit_code(state.latest_census)
    if plan.what == "experiment":
        return experiment_exit_code(state)
    if plan.what == "run":
        return documents.run_exit_code(run) if run is not None else ExitCode.UNDECIDED
    if plan.what == "demo" and run is not None and documents.run_exit_code(run) != ExitCode.DIVERGED:
        return documents.run_exit_code(run)
    return documents.locate_exit_code(run, state.located_now)
