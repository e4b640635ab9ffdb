"""Writes a located origin as a folder of the session: no server is needed.

Invariant: a session of this machine may keep its traces elsewhere (--trace-dir); one that was unpacked from a
bundle has none, and no place that it names is looked into.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klbench.errors import UndecidedError, UsageError
from klbench.session.bundle import is_unpacked
from klbench.session.folder import SessionFolder
from klbench.session.state import LocatedState

if TYPE_CHECKING:
    from klbench.engine.export import Export


def trace_dir_of(folder: SessionFolder, located: LocatedState) -> Path:
    """Where the trace of a located origin was kept. Raises UsageError where the result does not say, and
    UndecidedError for a bundle."""
    capture = located.result.get("capture")
    place = capture.get("trace_dir") if isinstance(capture, Mapping) else None
    if not place:
        raise UsageError("this result does not say where its trace is", next="locate once more")
    if is_unpacked(folder):
        raise UndecidedError(
            "a bundle holds no traces",
            why="they stay on the machine that located the origin",
            next="ask for a bundle made after `klbench export`: it has the origin's tensors and script",
        )
    return Path(str(place))


def finding_of(located: LocatedState | None, number: int) -> Mapping[str, Any]:
    """Finding `number` (from 0) of what was located. Raises UsageError where there is none."""
    findings = located.result.get("findings") if located is not None else None
    known = findings if isinstance(findings, list) else []
    if not 0 <= number < len(known) or not isinstance(known[number], Mapping):
        raise UsageError(f"there is no finding {number + 1}", why=f"{len(known)} were located")
    found: Mapping[str, Any] = known[number]
    return found


def export_located(
    folder: SessionFolder, located: LocatedState, number: int, to: Path | None = None
) -> Export:
    """Writes finding `number` (from 0) into `to` (new), else into a new folder `exports/origin-N`. Raises
    KlbenchError."""
    from klbench.engine.export import export_origin

    finding = finding_of(located, number)
    return export_origin(
        finding, number, trace_dir_of(folder, located), to or new_export_folder(folder.exports)
    )


def new_export_folder(parent: Path) -> Path:
    """The first name `origin-N` that is free."""
    number = 1
    while (parent / f"origin-{number}").exists():
        number += 1
    return parent / f"origin-{number}"
