"""`klbench selftest`: how often klbench is right about planted faults, and silent about clean servers.

model  cases  condition  confirmed  helpers  operator  layer  position  kind   undecided  ...
dense  10     10/10      9/10       10/10    9/9       9/9    9/9       9/9    0

clean servers: 3 configurations, 0 false accusations
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from klbench.cli import options as opt
from klbench.cli import table
from klbench.cli.failures import Interrupted, SignalSwitch, note, show, signals_switched, write_json
from klbench.errors import KlbenchError, UndecidedError


@click.command(cls=opt.TargetCommand)
@click.option(
    "--quick", "extent", flag_value="quick", default=True, help="A few faults of each family (default)."
)
@click.option(
    "--full", "extent", flag_value="full", help="Every fault on every model, other batches and servers."
)
@click.option("--family", "families", multiple=True, metavar="F", help="Only this family (repeatable).")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="NAME",
    help="Only this fault (repeatable); see demo --list-faults.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Choice(opt.DEMO_MODELS),
    help="Only this model (repeatable).",
)
@click.option(
    "--server-python", metavar="PATH", help="The Python that has sglang (default: the first found)."
)
@click.option(
    "--sessions",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Keep the sessions there, one for each server, to open them later.",
)
@opt.json_option
def selftest(
    extent: str,
    families: tuple[str, ...],
    faults: tuple[str, ...],
    models: tuple[str, ...],
    server_python: str | None,
    sessions: Path | None,
    json_place: str | None,
) -> int:
    """Plant faults with known truth on live servers and count how often the answers are right.

    Exit code 0 all right, 1 a wrong answer or a false accusation, 5 an answer is missing. With --json PATH
    each result is written when it is there, and an interrupted selftest is taken up from that file.
    """
    import asyncio

    from klbench.session.selftest.document import Document, exit_code
    from klbench.session.selftest.plan import Asked, make_plan

    asked = Asked(
        "full" if extent == "full" else "quick",
        models=tuple(dict.fromkeys(models)),
        families=tuple(dict.fromkeys(families)),
        faults=tuple(dict.fromkeys(faults)),
        arguments=opt.sglang_arguments(),
    )
    stations = make_plan(asked)
    place = Path(json_place).absolute() if json_place not in (None, "-") else None
    document = Document(asked, stations, place)
    if document.taken_up:
        note(f"{document.taken_up} results of an interrupted selftest are taken over from {place}")
    error: KlbenchError | None = None
    code: int | None = None
    with signals_switched() as switch, _folder(sessions) as folder:
        try:
            asyncio.run(_work(document, stations, asked.new_tokens, folder, server_python, switch))
        except Interrupted as signalled:
            code = signalled.exit_code
            name = signal.Signals(signalled.signum).name
            error = UndecidedError(f"interrupted by {name}", next="the same command takes it up")
        except KlbenchError as failed:
            error, code = failed, failed.exit_code
        # What was judged is delivered whole.
        switch.hold_once()
        result = document.as_dict(error)
        document.write(error)
        if json_place == "-":
            write_json("-", result)
        else:
            for line in lines(result):
                table.out(line)
    if error is not None:
        show(error)
    return exit_code(result) if code is None else code


async def _work(
    document: Any,
    stations: Any,
    new_tokens: int,
    folder: Path,
    server_python: str | None,
    switch: SignalSwitch,
) -> None:
    """Drives the selftest; a signal cancels it in order, and a second one is swallowed."""
    import asyncio

    from klbench.session.selftest.drive import Drive

    drive = Drive(
        stations, document, folder=folder, new_tokens=new_tokens, say=note, server_python=server_python
    )
    task = asyncio.create_task(drive.run())
    loop = asyncio.get_running_loop()
    signalled: list[int] = []

    def stop(signum: int) -> None:
        signalled.append(signum)
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(task.cancel)
        switch.react = lambda _: None

    switch.react = stop
    try:
        await task
    except asyncio.CancelledError:
        if signalled:
            raise Interrupted(signalled[0]) from None
        raise
    finally:
        switch.react = lambda _: None


@contextlib.contextmanager
def _folder(sessions: Path | None) -> Iterator[Path]:
    """Where the sessions go; without a wish they go when the selftest has ended."""
    if sessions is not None:
        yield sessions.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="klbench-selftest-") as folder:
        yield Path(folder)


def lines(document: Mapping[str, Any]) -> list[str]:
    """A klbench.selftest/1 document for a person."""
    from klbench.core.accuracy_table import NAMES, not_right, rows, without_rule

    cases, clean, counted = document["cases"], document["clean"], document["summary"]
    found: list[str] = []
    for by in ("model", "family", "configuration", "workload") if cases else ():
        if by == "model" or len({case[by] for case in cases}) > 1:
            found += [*table.columns((by, *NAMES), rows(cases, by)), ""]
    if unruled := without_rule(cases):
        found += ["not counted, because the truth has no rule for it: " + "; ".join(unruled), ""]
    if open_cases := not_right(cases, clean):
        found += [*open_cases, ""]
    if clean:
        accused = counted["false_accusations"]
        found.append(
            f"clean servers: {counted['clean_configurations']} configurations, {accused} false accusations"
        )
    done = counted["cases"] + counted["clean_configurations"]
    if done < document["planned"]:
        found.append(f"{done} of {document['planned']} were done")
    return found
