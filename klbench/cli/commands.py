"""The commands of `klbench`: what each takes, and which module does it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from klbench import blas, collecting
from klbench.cli import config as config_commands
from klbench.cli import diagnosis_commands, session_commands, versions
from klbench.cli import options as opt
from klbench.cli.calibrate import calibrate
from klbench.cli.census import census
from klbench.cli.completing import complete_sessions
from klbench.cli.emit_test import emit_test
from klbench.cli.experiment import experiment
from klbench.cli.export import export
from klbench.cli.manual import help_
from klbench.cli.selftest import selftest
from klbench.errors import ExitCode, UsageError
from klbench.tui import slow_link

# They must work where the configuration does not, or were told everything by whoever started them.
_WITHOUT_SETTINGS = frozenset({"config", "completion", "runner", "env", "help"})


def _exit_codes() -> str:
    """The epilog: what each says, in three columns."""
    cells = [f"{int(code):<4} {code.meaning}" for code in ExitCode]
    columns = ((cells[:3], 24), (cells[3:7], 28), (cells[7:], 0))
    lines = [
        "".join((column[at] if at < len(column) else "").ljust(width) for column, width in columns).rstrip()
        for at in range(4)
    ]
    return "\n".join(["\b", "Exit codes:", *(f"  {line}" for line in lines)])


EXIT_CODES = _exit_codes()


def has_terminal() -> bool:
    """Whether the workbench can be shown: in lines, or on a terminal that moves its cursor."""
    return in_lines() or why_no_terminal() == ""


def in_lines() -> bool:
    """Whether the workbench speaks in lines: as the command line says, else as set where somebody types."""
    asked = click.get_current_context().find_root().params.get("plain")
    if asked is not None:
        return bool(asked)
    from klbench.tui import keymap

    return sys.stdin.isatty() and bool(keymap.load()["workbench.plain"])


def why_no_terminal() -> str:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return "standard input or output is not one"
    kind = os.environ.get("TERM", "")
    return f"TERM={kind or '(not set)'} is one that cannot move its cursor" if kind in ("", "dumb") else ""


def workbench(*, session: Path | None, start: dict[str, Any] | None, readonly: bool = False) -> int:
    flags = {
        f"workbench.{name}": value
        for name, value in click.get_current_context().find_root().params.items()
        if value is not None
    }
    from klbench.tui import keymap

    in_force = keymap.load().with_flags(flags)
    if in_lines():
        from klbench.cli import table
        from klbench.cli.plain import work_in_lines

        return work_in_lines(session=session, start=start, readonly=readonly, say=table.out)
    slow_link.prepare(slow=bool(in_force["workbench.slow_link"]))  # before textual is imported
    with collecting.put_off():  # the workbench begins once its first picture is there
        with blas.without_threads():
            from klbench.tui.terminal import run_workbench
        return run_workbench(session=session, start=start, readonly=readonly, settings=in_force)


def _as_dict(start: Any) -> dict[str, Any]:
    import msgspec

    built: dict[str, Any] = msgspec.to_builtins(start)
    return built


@click.group(
    invoke_without_command=True,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    callback=versions.print_version,
    help="Print the version; with -vv also those of Python, Textual, sglang and torch, terminal and paths.",
)
@click.option(
    "-v",
    "--verbose",
    count=True,
    is_eager=True,
    expose_value=False,
    callback=versions.keep_verbosity,
    help="With --version: more.",
)
@click.option("--theme", type=click.Choice(("dark", "light")), help="Colours of the workbench.")
@click.option("--ascii", flag_value="on", help="Draw the workbench with ASCII characters only.")
@click.option("--compact/--no-compact", default=None, help="Show more rows and less around them.")
@click.option(
    "--plain/--no-plain", default=None, help="Speak in lines instead of screens, for screen readers."
)
@click.option("--slow-link", is_flag=True, default=None, help="Send as little as possible over the line.")
@click.option("--mouse/--no-mouse", default=None, help="Whether the workbench takes the mouse.")
@click.pass_context
def klbench(ctx: click.Context, /, **_of_the_workbench: Any) -> int:
    """Find where prefill and decode logprobs diverge in sglang, and prove it.

    Without a command: the workbench.
    """
    if versions.verbosity(ctx):
        raise UsageError("-v goes with --version", next="klbench --version -vv")
    if ctx.invoked_subcommand is not None:
        if ctx.invoked_subcommand not in _WITHOUT_SETTINGS:
            from klbench.tui import keymap

            in_force = keymap.load()
            keymap.use(in_force)
            defaults = in_force.run_defaults()
            ctx.default_map = dict.fromkeys(ctx.command.list_commands(ctx), defaults)  # type: ignore[attr-defined]
        return ExitCode.CONSISTENT
    if not in_lines() and (why := why_no_terminal()):
        raise UsageError(
            "the workbench needs a terminal",
            why=why,
            next="klbench run and klbench locate work without, klbench --help lists all",
        )
    return workbench(session=None, start=None)


@klbench.command(cls=opt.TargetCommand)
@opt.target_options
@opt.common_options
@click.option(
    "--like",
    metavar="SESSION",
    shell_complete=complete_sessions,
    help="Repeat what a session measured, and compare with it.",
)
@click.option(
    "--same-verdict",
    is_flag=True,
    help="With --like: exit code 0 when helpers and verdict say the same as then, 1 when not.",
)
@opt.json_option
def run(
    demo: str | None,
    model_path: str | None,
    url: str | None,
    json_place: str | None,
    session: Path | None,
    like: str | None,
    same_verdict: bool,
    **options: Any,
) -> int:
    """Run the consistency helpers on a server; exit code 1 when one diverged.

    With --session DIR alone: continue what was interrupted there, or run it once more. With --like SESSION:
    the same command, prompts and helpers once more, shown beside what they gave then, with the change of
    sglang's code named.
    """
    given = demo or model_path or url or opt.sglang_arguments()
    if same_verdict and like is None:
        raise UsageError("--same-verdict needs --like", next="klbench run --like SESSION --same-verdict")
    if like is not None and given:
        raise UsageError("--like names the target itself", next=f"klbench run --like {like}")
    if like is not None or (session is not None and not given):
        from klbench.cli import again

        if like is not None:
            return again.run_like(
                like, session=session, json_place=json_place, options=options, same_verdict=same_verdict
            )
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
@click.option(
    "--request",
    type=click.IntRange(0),
    metavar="N",
    help="Which request of the helper. Default: the earliest divergent one.",
)
@opt.backend_option
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


@klbench.command(cls=opt.DemoCommand)
@click.argument("model", required=False, type=click.Choice(opt.DEMO_MODELS), default="dense")
@click.option("--list-faults", is_flag=True, help="Explain the faults that --fault can plant, and exit.")
@opt.common_options
@opt.backend_option
@opt.json_option
def demo(model: str, list_faults: bool, json_place: str | None, session: Path | None, **options: Any) -> int:
    """Try it on a tiny model, with or without a GPU: the workbench in a terminal, else run and locate.

    Fewer new tokens than run takes, and ready to capture from the start.
    """
    if list_faults:
        return _list_faults(json_place)
    start = opt.build_request(
        demo=model,
        model_path=None,
        url=None,
        ready_by_default=True,
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
    from klbench.insitu.faults_truth import NEEDS

    if json_place is not None:
        faults = [
            {
                "name": f.name,
                "explanation": list(f.explanation),
                "parameters": dict(f.parameters),
                "models": list(f.truth.models),
                "needs": list(f.truth.needs),
            }
            for f in CATALOGUE.values()
        ]
        pairs = [
            {
                "name": p.name,
                "explanation": list(p.explanation),
                "parameters": {},
                "models": list(p.models),
                "needs": [],
            }
            for p in PAIR_CATALOGUE.values()
        ]
        write_json(json_place, {"faults": faults + pairs})
    if json_place != "-":
        entries = [
            (f.name, parse_fault(f.name).spelled, f.truth.models, f.truth.needs, f.explanation)
            for f in CATALOGUE.values()
        ]
        entries += [
            (p.name, "+".join(p.faults), p.models, (), p.explanation) for p in PAIR_CATALOGUE.values()
        ]
        for name, spelled, models, needs, explanation in entries:
            needed = f" · fires only with {', '.join(NEEDS[need] for need in needs)}" if needs else ""
            table.out(f"{name}  ({spelled}) on {', '.join(models)}{needed}")
            for line in explanation:
                table.out(f"    {line}")
    return ExitCode.CONSISTENT


klbench.add_command(config_commands.config)
klbench.add_command(config_commands.completion)
klbench.add_command(calibrate)
klbench.add_command(census)
klbench.add_command(emit_test)
klbench.add_command(experiment)
klbench.add_command(export)
klbench.add_command(diagnosis_commands.guide)
klbench.add_command(help_)
klbench.add_command(selftest)
klbench.add_command(session_commands.open_)
klbench.add_command(session_commands.sessions)
klbench.add_command(session_commands.compare)
klbench.add_command(session_commands.report)


@klbench.command()
@opt.path_map_option
@opt.json_option
def env(path_maps: tuple[str, ...], json_place: str | None) -> int:
    """Print the exports to put before a server's own launch, so that klbench can look inside it."""
    from klbench.cli.environment import print_exports

    return print_exports(json_place, path_maps)


@klbench.command()
@click.option("--server-python", metavar="PATH", help="The Python to ask for sglang.")
@click.option("--end-left-over", is_flag=True, help="End what a klbench that was killed has left behind.")
@opt.json_option
def doctor(server_python: str | None, end_left_over: bool, json_place: str | None) -> int:
    """Say what this machine can do, and how to mend what it cannot."""
    from klbench.cli.doctor import examine

    return examine(server_python, json_place, end_left_over=end_left_over)


@klbench.command(hidden=True)
@click.option("--session", required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option("--keep-idle", type=opt.FiniteRange(0), metavar="SECONDS")
def runner(session: Path, keep_idle: float | None) -> int:
    """Own a session's server and work, without a terminal; what to do comes through standard input."""
    from klbench.session.bench import make_work
    from klbench.session.detached import run_detached

    return run_detached(session, sys.stdin.buffer.read(), make_work, keep_idle_s=keep_idle)
