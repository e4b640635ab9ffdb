"""`klbench export SESSION`: an origin as a folder with its tensors and a script that shows the difference."""

from __future__ import annotations

from pathlib import Path

import click

from klbench.cli import options as opt
from klbench.cli import table
from klbench.cli.completing import complete_sessions
from klbench.errors import ExitCode, UsageError


@click.command()
@click.argument("session", shell_complete=complete_sessions)
@click.option(
    "--finding",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Which finding of the capture.",
)
@click.option(
    "--to",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The new folder (default: in the session).",
)
@opt.json_option
def export(session: str, finding: int, to: Path | None, json_place: str | None) -> int:
    """Write the located origin as a folder: tensors, and a script that needs no server and no klbench."""
    from klbench.cli.failures import write_json
    from klbench.session.exporting import export_located
    from klbench.session.folder import check_writable_place, find_session
    from klbench.session.reading import read_state

    folder = find_session(session)
    folder.read_session_file()
    located = read_state(folder).latest_located
    if located is None:
        raise UsageError("nothing was located in this session", next=f"klbench open {session}")
    if to is not None:
        if to.exists():
            raise UsageError(f"{to} exists", next="name a new folder with --to")
        check_writable_place(to)
    done = export_located(folder, located, finding - 1, to)
    if json_place is not None:
        content = {"folder": str(done.folder), "restated": done.restated, "why_not": done.why_not or None}
        write_json(json_place, content)
    if json_place != "-":
        table.out(str(done.folder))
        table.out("python show.py in it shows the difference; it needs torch and safetensors")
        if done.why_not:
            table.out(f"it compares the recorded outputs alone: {done.why_not}")
    return ExitCode.CONSISTENT
