"""`klbench report`: which files are written, redacted or not, and the bundle."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from klbench.cli import table
from klbench.cli.failures import note, write_json
from klbench.engine.environment_report import environment_report
from klbench.errors import ExitCode, KlbenchError, UsageError
from klbench.session.bundle import bundle_file, write_bundle
from klbench.session.folder import SessionFolder
from klbench.session.reading import read_state
from klbench.session.redaction import Redactor, redactor_for
from klbench.session.report import FORMATS, Format, gather, write_report
from klbench.session.report_github import Appendix
from klbench.session.state import SessionState

_MOST_SCRIPT_BYTES = 64 * 1024


def write(
    folder: SessionFolder,
    formats: Sequence[str],
    *,
    redact: bool,
    bundle: bool,
    output: Path | None,
    json_place: str | None,
) -> int:
    """Writes what was asked for and prints the files' names."""
    state = read_state(folder)
    redactor = redactor_for(state)
    chosen = cast("tuple[Format, ...]", tuple(dict.fromkeys(formats))) or (
        () if bundle and output else FORMATS
    )
    files: list[Path] = []
    file = output if not bundle else None
    if "github" in chosen:
        # An issue is public: redacted whether asked or not.
        appendix = _appendix(folder, state, redactor)
        files += write_report(folder, state, ["github"], redactor=redactor, appendix=appendix, output=file)
    plain = [name for name in chosen if name != "github"]
    if plain:
        files += write_report(folder, state, plain, redactor=redactor if redact else None, output=file)
    if bundle:
        archive = bundle_file(folder, output)
        files.append(write_bundle(folder, archive, redactor if redact else None))
    if json_place is not None:
        report = gather(folder.path, state)
        write_json(json_place, redactor.report(report) if redact else report)
    if json_place != "-":
        for file in files:
            table.out(str(file))
    return ExitCode.CONSISTENT


def _appendix(folder: SessionFolder, state: SessionState, redactor: Redactor) -> Appendix:
    """What a maintainer asks for; a part that cannot be had says why."""
    environment, missing = None, ""
    note("asking sglang for the report of its environment that maintainers want: it imports torch for that")
    try:
        version = state.server.facts.get("sglang_version")
        report = environment_report(None, version if isinstance(version, str) else None)
        environment = redactor.text(asyncio.run(report))
    except KlbenchError as error:
        missing = redactor.text(" · ".join(part for part in (error.what, error.why) if part))
    script = _script(folder)
    return Appendix(
        environment=environment,
        environment_missing=missing,
        script=redactor.text(script.read_text(encoding="utf-8", errors="replace")) if script else None,
        script_name=script.name if script else "",
    )


def _script(folder: SessionFolder) -> Path | None:
    """The newest exported operator script of a sane size."""
    found = []
    for file in folder.exports.rglob("*.py"):
        with contextlib.suppress(UsageError):
            script = folder.resolve(folder.relative(file))
            if script.is_file() and script.stat().st_size <= _MOST_SCRIPT_BYTES:
                found.append(script)
    return max(found, key=lambda file: os.stat(file).st_mtime, default=None)
