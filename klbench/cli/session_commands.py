"""The commands about recorded sessions: open, sessions, compare, report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from klbench.cli import options as opt
from klbench.cli.completing import complete_sessions
from klbench.errors import ExitCode, UsageError


@click.command("open")
@click.argument("session", metavar="[SESSION|BUNDLE]", required=False, shell_complete=complete_sessions)
@click.option("--continue", "go_on", is_flag=True, help="Take up an interrupted run where it was.")
@opt.progress_option
@opt.json_option
def open_(session: str | None, go_on: bool, json_place: str | None) -> int:
    """Come back to a session: attach to its runner where one lives, else read what is there.

    An interrupted run is offered to be continued; a bundle is read without its session.
    """
    from klbench.cli import opening

    return opening.open_session(session, go_on=go_on, json_place=json_place)


@click.group(invoke_without_command=True)
@opt.json_option
@click.pass_context
def sessions(ctx: click.Context, json_place: str | None) -> int:
    """List the sessions: what they are about, what they found, who works on them."""
    if ctx.invoked_subcommand is not None:
        return ExitCode.CONSISTENT
    from klbench.cli import listing

    return listing.list_all(json_place)


@sessions.command("prune")
@click.argument("session", nargs=-1, shell_complete=complete_sessions)
@click.option("--older-than", type=opt.FiniteRange(0), metavar="DAYS", help="Only sessions so old.")
@click.option("--whole", is_flag=True, help="Remove whole sessions, not only their traces.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@opt.json_option
def prune(
    session: tuple[str, ...], older_than: float | None, whole: bool, yes: bool, json_place: str | None
) -> int:
    """Free space: the traces of ended sessions, with --whole the sessions themselves.

    Sessions that a runner works on are left alone. Traces in a --trace-dir are yours to remove.
    """
    from klbench.cli import listing

    return listing.prune(session, older_than_days=older_than, whole=whole, yes=yes, json_place=json_place)


@click.command()
@click.argument("before", shell_complete=complete_sessions)
@click.argument("after", shell_complete=complete_sessions)
@click.option("--anyway", is_flag=True, help="Compare although settings of the server differ.")
@opt.json_option
def compare(before: str, after: str, anyway: bool, json_place: str | None) -> int:
    """Compare two sessions with the same prompts, helper by helper and token by token.

    Exit code 1 when they differ, 5 when they cannot be compared.
    """
    import asyncio

    from klbench.cli import compare_table, table
    from klbench.cli.failures import write_json
    from klbench.session import comparing
    from klbench.session.bundle import read_with_care
    from klbench.session.reading import read_state

    folders = [_readable(name) for name in (before, after)]
    with read_with_care(folders[0]), read_with_care(folders[1]):
        sides = [comparing.side_of(folder, read_state(folder)) for folder in folders]
        document = asyncio.run(comparing.compare(*sides, anyway=anyway))
    if json_place is not None:
        write_json(json_place, document)
    if json_place != "-":
        for line in compare_table.lines(document):
            table.out(line)
    return comparing.exit_code(document)


@click.command()
@click.argument("session", shell_complete=complete_sessions)
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(("md", "html", "json", "github")),
    help="Only this format (repeatable). Default: md, html and json.",
)
@click.option(
    "--redact",
    is_flag=True,
    help="Leave out host and user names, addresses, keys, prompts, and all but the last name of paths.",
)
@click.option("--bundle", is_flag=True, help="One archive for a colleague: reports, measurements, logs.")
@click.option("--output", type=click.Path(path_type=Path), metavar="PATH", help="Where the one file goes.")
@opt.json_option
def report(
    session: str,
    formats: tuple[str, ...],
    redact: bool,
    bundle: bool,
    output: Path | None,
    json_place: str | None,
) -> int:
    """Write the report of a session: Markdown, HTML and JSON, each one self-contained file.

    github is Markdown for an issue: under 60 KB, with folded sections, prompts left out.
    """
    if output is not None and len(formats) + bundle != 1:
        raise UsageError("--output needs one --format, or --bundle", next="name one of them")
    if str(output) == "-":
        raise UsageError("a report does not go to standard output", next="--output /dev/stdout, or --json -")
    from klbench.cli import reporting
    from klbench.session.bundle import read_with_care

    folder = _readable(session)
    with read_with_care(folder):
        return reporting.write(
            folder, formats, redact=redact, bundle=bundle, output=output, json_place=json_place
        )


def _readable(name: str) -> Any:
    """The session of that name, or the one in a bundle. Raises UsageError."""
    from klbench.session.bundle import find_session_or_bundle

    folder = find_session_or_bundle(name)
    folder.read_session_file()
    return folder
