"""The commands of `klbench`: what each takes, and which module does it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

import klbench as package
from klbench.cli import diagnosis_commands, session_commands
from klbench.cli import options as opt
from klbench.cli.calibrate import calibrate
from klbench.cli.census import census
from klbench.cli.emit_test import emit_test
from klbench.cli.experiment import experiment
from klbench.cli.export import export
from klbench.errors import ExitCode, UsageError

EXIT_CODES = """\b
Exit codes:
  0    consistent            3   server not available    129  hung up
  1    divergence found      4   timeout                 130  interrupted
  2    usage                 5   could not answer        143  terminated
                             70  internal error
"""


def has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def workbench(*, session: Path | None, start: dict[str, Any] | None, readonly: bool = False) -> int:
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
    if not has_terminal():
        raise UsageError(
            "the workbench needs a terminal",
            why="standard input or output is not one",
            next="klbench run and klbench locate work without, klbench --help lists all",
        )
    return workbench(session=None, start=None)


@klbench.command(cls=opt.TargetCommand)
@opt.target_options
@opt.common_options
@click.option("--like", metavar="SESSION", help="Repeat what a session measured, and compare with it.")
@opt.json_option
def run(
    demo: str | None,
    model_path: str | None,
    url: str | None,
    json_place: str | None,
    session: Path | None,
    like: str | None,
    **options: Any,
) -> int:
    """Run the consistency helpers on a server; exit code 1 when one diverged.

    With --session DIR alone: continue what was interrupted there. With --like SESSION: the same command,
    prompts and helpers once more, shown beside what they gave then, with the change of sglang's code named.
    """
    given = demo or model_path or url or opt.sglang_arguments()
    if like is not None and given:
        raise UsageError("--like names the target itself", next=f"klbench run --like {like}")
    if like is not None or (session is not None and not given):
        from klbench.cli import again

        if like is not None:
            return again.run_like(like, session=session, json_place=json_place, options=options)
        if session is not None and again.is_session(session):
            return again.run_again(session, json_place=json_place)
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
    if has_terminal() and json_place is None:
        if session is None:
            return workbench(session=None, start=_as_dict(start))
        import asyncio

        from klbench.session.link import start_session

        return workbench(session=asyncio.run(start_session(start, session=session)).path, start=None)
    from klbench.cli import headless
    from klbench.session.bench import make_work

    return headless.execute(
        start, headless.Plan("demo"), session=session, json_place=json_place, make_work=make_work
    )


def _list_faults(json_place: str | None) -> int:
    from klbench.cli import table
    from klbench.cli.failures import write_json
    from klbench.insitu.faults_catalogue import CATALOGUE, PAIR_CATALOGUE, parse_fault

    if json_place is not None:
        faults = [
            {
                "name": f.name,
                "explanation": list(f.explanation),
                "parameters": dict(f.parameters),
                "models": list(f.truth.models),
            }
            for f in CATALOGUE.values()
        ]
        pairs = [
            {"name": p.name, "explanation": list(p.explanation), "parameters": {}, "models": list(p.models)}
            for p in PAIR_CATALOGUE.values()
        ]
        write_json(json_place, {"faults": faults + pairs})
    if json_place != "-":
        entries = [
            (f.name, parse_fault(f.name).spelled, f.truth.models, f.explanation) for f in CATALOGUE.values()
        ]
        entries += [(p.name, "+".join(p.faults), p.models, p.explanation) for p in PAIR_CATALOGUE.values()]
        for name, spelled, models, explanation in entries:
            table.out(f"{name}  ({spelled}) on {', '.join(models)}")
            for line in explanation:
                table.out(f"    {line}")
    return ExitCode.CONSISTENT


klbench.add_command(calibrate)
klbench.add_command(census)
klbench.add_command(emit_test)
klbench.add_command(experiment)
klbench.add_command(export)
klbench.add_command(diagnosis_commands.guide)
klbench.add_command(session_commands.open_)
klbench.add_command(session_commands.sessions)
klbench.add_command(session_commands.compare)
klbench.add_command(session_commands.report)


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
