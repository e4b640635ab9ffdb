"""`klbench sessions` and `klbench sessions prune`.

session                     status  doing          server  size    traces  found
20261129-191730-demo-dense  ended                  stopped 2.9 MB  0 B     match clean · ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from klbench.cli import table
from klbench.cli.failures import note, write_json
from klbench.core.text import counted, size
from klbench.errors import ExitCode, UsageError
from klbench.session.documents import iso_time
from klbench.session.folder import find_session
from klbench.session.pruning import candidates, remove
from klbench.session.survey import survey


def list_all(json_place: str | None) -> int:
    """Prints the sessions, the newest first."""
    found, unreadable = survey()
    if json_place is not None:
        fields = ("label", "status", "doing", "server", "found", "verdict", "size_bytes", "traces_bytes")
        listed = [
            {
                "session": str(item.folder.path),
                "created_at": iso_time(item.created_at),
                **{name: getattr(item, name) for name in fields},
            }
            for item in found
        ]
        refused = [{"session": str(folder.path), "why": why} for folder, why in unreadable]
        write_json(json_place, {"sessions": listed, "unreadable": refused})
    if json_place == "-":
        return ExitCode.CONSISTENT
    if not found and not unreadable:
        table.out("no sessions yet · klbench demo makes one")
        return ExitCode.CONSISTENT
    rows = [
        [
            item.folder.name,
            item.status,
            item.doing or item.server,
            size(item.size_bytes),
            size(item.traces_bytes),
            item.verdict,
            item.found,
        ]
        for item in found
    ]
    names = ("session", "status", "server", "size", "traces", "verdict", "found")
    for line in table.columns_or_blocks(names, rows, table.terminal_width()):
        table.out(line)
    for folder, why in unreadable:
        table.out(f"{folder.name}  cannot be read: {why}")
    table.out(f"{counted(len(found), 'session')}, {size(sum(item.size_bytes for item in found))}")
    return ExitCode.CONSISTENT


def prune(
    names: Sequence[str], *, older_than_days: float | None, whole: bool, yes: bool, json_place: str | None
) -> int:
    """Removes traces, or whole sessions, after the user agreed."""
    folders = [find_session(name) for name in names] or None
    found, left_alone = candidates(folders, older_than_days=older_than_days, whole=whole)
    for folder, why in left_alone:
        note(f"left alone: {folder.name} · {why}")
    total = sum(item.size_bytes for item in found)
    for item in found:
        note(f"{item.folder.name}  {'the whole session' if whole else 'traces'}  {size(item.size_bytes)}")
    removed: list[dict[str, object]] = []
    if found:
        what = counted(len(found), "session")
        what = what if whole else f"the traces of {what}"
        _agree(f"remove {what}, {size(total)}", yes)
        for item in found:
            remove(item, whole=whole)
            removed.append({"session": str(item.folder.path), "size_bytes": item.size_bytes})
    if json_place is not None:
        write_json(json_place, {"removed": removed, "whole": whole, "size_bytes": total})
    if json_place != "-":
        table.out(f"removed {size(total)}" if found else "nothing to remove")
    return ExitCode.CONSISTENT


def _agree(what: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"it needs your agreement to {what}", next="agree with --yes")
    if not click.confirm(f"{what}?", default=False, err=True):
        raise UsageError("nothing was removed", why="you did not agree")
