"""The commands of `klbench`: what each takes, and which module does it."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Any

import click

import klbench as package
from klbench.cli import options as opt
from klbench.errors import ExitCode, UsageError

EXIT_CODES = """\b
Exit codes:
  0    consistent            3   server not available    129  hung up
  1    divergence found      4   timeout                 130  interrupted
  2    usage                 5   could not answer        143  terminated
                             70  internal error
"""


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _workbench(*, session: Path | None, start: dict[str, Any] | None, readonly: bool = False) -> int:
    from klbench.tui.app import run_workbench

    return run_workbench(session=session, start=start, readonly=readonly)


def _as_dict(start: Any) -> dict[str, Any]:
    import msgspec

    built: dict[str, Any] = msgspec.to_builtins(start)
    return built


@click.group(
    invoke_without_command=True,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package.__version__, prog_name="klbench", message="%(prog)s %(version)s")
@click.pass_context
def klbench(ctx: click.Context) -> int:
    """Find where prefill and decode logprobs diverge in sglang, and prove it.

    Without a command: the workbench.
    """
    if ctx.invoked_subcommand is not None:
        return ExitCode.CONSISTENT
    if not _has_terminal():
        raise UsageError(
            "the workbench needs a terminal",
            why="standard input or output is not one",
            next="klbench run and klbench locate work without, klbench --help lists all",
        )
    return _workbench(session=None, start=None)


@klbench.command(cls=opt.TargetCommand)
@opt.target_options
@opt.common_options
@opt.json_option
def run(
    demo: str | None,
    model_path: str | None,
    url: str | None,
    json_place: str | None,
    session: Path | None,
    **options: Any,
) -> int:
    """Run the consistency helpers on a server; exit code 1 when one diverged."""
    start = opt.build_request(demo=demo, model_path=model_path, url=url, **options)
    from klbench.cli import headless
    from klbench.session.bench import make_work

    return headless.execute(
        start, headless.Plan("run"), session=session, json_place=json_place, make_work=make_work
    )


@klbench.command(cls=opt.TargetCommand)
@opt.target_options
@opt.common_options
@click.option("--request", type=click.IntRange(0), metavar="N", help="Default: the earliest divergent one.")
@opt.json_option
def locate(
    demo: str | None,
    model_path: str | None,
    url: str | None,
    json_place: str | None,
    session: Path | None,
    request: int | None,
    **options: Any,
) -> int:
    """Run the helpers and name the operator where the divergence is born; exit code 1 when one was found."""
    start = opt.build_request(demo=demo, model_path=model_path, url=url, ready_by_default=True, **options)
    helpers = start.options.helpers
    if request is not None and len(helpers) != 1:
        raise UsageError("--request needs one --helper", why="requests are numbered within a helper")
    from klbench.cli import headless
    from klbench.session.bench import make_work

    plan = headless.Plan("locate", helper=helpers[0] if len(helpers) == 1 else None, request=request)
    return headless.execute(start, plan, session=session, json_place=json_place, make_work=make_work)


@klbench.command(cls=opt.TargetCommand)
@click.argument("model", required=False, type=click.Choice(opt.DEMO_MODELS), default="dense")
@click.option("--list-faults", is_flag=True, help="Explain the faults that --fault can plant, and exit.")
@opt.common_options
@opt.json_option
def demo(model: str, list_faults: bool, json_place: str | None, session: Path | None, **options: Any) -> int:
    """Try it on a tiny model, on any machine: the workbench in a terminal, else run and locate.

    128 new tokens where run takes 512, and ready to capture from the start.
    """
    if list_faults:
        return _list_faults(json_place)
    start = opt.build_request(
        demo=model,
        model_path=None,
        url=None,
        ready_by_default=True,
        max_new_tokens_by_default=128,
        **options,
    )
    if _has_terminal() and json_place is None:
        if session is None:
            return _workbench(session=None, start=_as_dict(start))
        import asyncio

        from klbench.session.link import start_session

        return _workbench(session=asyncio.run(start_session(start, session=session)).path, start=None)
    from klbench.cli import headless
    from klbench.session.bench import make_work

    return headless.execute(
        start, headless.Plan("demo"), session=session, json_place=json_place, make_work=make_work
    )


def _list_faults(json_place: str | None) -> int:
    from klbench.cli import table
    from klbench.cli.failures import write_json
    from klbench.insitu.faults_catalogue import CATALOGUE

    if json_place is not None:
        faults = [
            {"name": f.name, "explanation": list(f.explanation), "parameters": dict(f.parameters)}
            for f in CATALOGUE.values()
        ]
        write_json(json_place, {"faults": faults})
    if json_place != "-":
        for fault in CATALOGUE.values():
            parameters = ",".join(f"{name}={value}" for name, value in fault.parameters.items())
            table.out(f"{fault.name}  ({fault.name}:{parameters})")
            for line in fault.explanation:
                table.out(f"    {line}")
    return ExitCode.CONSISTENT


@klbench.command("open")
@click.argument("session", required=False)
def open_(session: str | None) -> int:
    """Come back to a session: attach to its runner where one lives, else read what is there."""
    from klbench.session import folder as folders
    from klbench.session.link import find_runner

    if session is not None:
        folder: folders.SessionFolder | None = folders.find_session(session)
    else:
        live = [known for known in folders.all_sessions() if _is_live_here(known)]
        folder = live[0] if len(live) == 1 else None
    if not _has_terminal():
        if folder is None:
            raise UsageError("which session?", next="klbench sessions lists them")
        return _print_session(folder)
    if folder is None:
        return _workbench(session=None, start=None)
    folder.read_session_file()
    lock = find_runner(folder)
    return _workbench(session=folder.path, start=None, readonly=lock is None or not lock.local)


def _is_live_here(folder: Any) -> bool:
    lock = folder.read_lock()
    return lock is not None and lock.local and lock.alive


def _print_session(folder: Any) -> int:
    from klbench.cli import table
    from klbench.session import documents
    from klbench.session.link import read_state

    folder.read_session_file()
    state = read_state(folder)
    for line in table.run_lines(documents.run_document(folder.path, state, state.run)):
        table.out(line)
    if state.located:
        document = documents.locate_document(folder.path, state, state.run, state.latest_located)
        for line in ["", *table.locate_lines(document)[:-2]]:
            table.out(line)
    return ExitCode.CONSISTENT


@klbench.command()
@opt.json_option
def sessions(json_place: str | None) -> int:
    """List the sessions: what they are about, what they found, who works on them."""
    from klbench.cli import table
    from klbench.cli.failures import write_json
    from klbench.core.text import size
    from klbench.session.documents import iso_time
    from klbench.session.link import list_sessions

    found = list_sessions()
    if json_place is not None:
        fields = ("label", "status", "doing", "found", "size_bytes")
        listed = [
            {
                "session": str(item.folder.path),
                "created_at": iso_time(item.created_at),
                **{name: getattr(item, name) for name in fields},
            }
            for item in found
        ]
        write_json(json_place, {"sessions": listed})
    if json_place != "-":
        if not found:
            table.out("no sessions yet · klbench demo makes one")
            return ExitCode.CONSISTENT
        rows = [
            [item.folder.name, item.status, item.doing, size(item.size_bytes), item.found] for item in found
        ]
        for line in table.columns(("session", "status", "doing", "size", "found"), rows):
            table.out(line)
    return ExitCode.CONSISTENT


@klbench.command()
@click.argument("session")
@opt.json_option
def report(session: str, json_place: str | None) -> int:
    """Write the report of a session: one Markdown file and one JSON file."""
    from klbench.cli import table
    from klbench.cli.failures import write_json
    from klbench.session.folder import find_session
    from klbench.session.link import read_state
    from klbench.session.report import write_report

    folder = find_session(session)
    folder.read_session_file()
    files = write_report(folder, read_state(folder))
    if json_place is not None:
        write_json(json_place, json_module.loads(files[1].read_bytes()))
    if json_place != "-":
        for file in files:
            table.out(str(file))
    return ExitCode.CONSISTENT


@klbench.command()
@opt.json_option
def env(json_place: str | None) -> int:
    """Print the exports to put before a server's own launch, so that klbench can look inside it."""
    from klbench.cli.environment import print_exports

    return print_exports(json_place)


@klbench.command()
@click.option("--server-python", metavar="PATH", help="The Python to ask for sglang.")
@opt.json_option
def doctor(server_python: str | None, json_place: str | None) -> int:
    """Say what this machine can do, and how to mend what it cannot."""
    from klbench.cli.doctor import examine

    return examine(server_python, json_place)


@klbench.command(hidden=True)
@click.option("--session", required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option("--keep-idle", type=click.FloatRange(0), metavar="SECONDS")
def runner(session: Path, keep_idle: float | None) -> int:
    """Own a session's server and work, without a terminal; what to do comes through standard input."""
    from klbench.session.bench import make_work
    from klbench.session.detached import run_detached

    return run_detached(session, sys.stdin.buffer.read(), make_work, keep_idle_s=keep_idle)
