"""A report for a GitHub issue: under 60 KB, folded, prompts left out, with what a maintainer asks for.

It ends with the shortest command that starts such a server, the exported operator script where there is one,
and sglang's own environment report. Always redacted: an issue is public.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from klbench.session.report_blocks import Block, Fence, Fold, heading, paragraph
from klbench.session.report_content import Detail, blocks
from klbench.session.report_markdown import markdown

if TYPE_CHECKING:
    from klbench.session.report import Report

MAX_BYTES = 60_000
_DETAILS = (
    Detail(divergent=16, around=40, masked=20, troubles=20, runs=3),
    Detail(divergent=8, around=16, masked=8, troubles=8, runs=1),
    Detail(divergent=3, around=6, masked=3, troubles=3, runs=1),
)
_PART_BYTES = (16_000, 6_000, 2_000)
# What only klbench or this machine needs: the shortest command has what decides the server's numbers.
_OURS = {"--host": 1, "--port": 1, "--decode-log-interval": 1, "--sleep-on-idle": 0, "--log-level": 1}


@dataclass(frozen=True, slots=True)
class Appendix:
    """What an issue ends with; the texts are redacted already."""

    environment: str | None = None
    """What sglang says of its environment, or None."""
    environment_missing: str = ""
    script: str | None = None
    script_name: str = ""


def github(report: Report, appendix: Appendix) -> str:
    """Markdown of at most MAX_BYTES bytes in UTF-8; what is left out is said."""
    for detail, most in zip(_DETAILS, _PART_BYTES, strict=True):
        shown = blocks(report, detail) + _appendix(report, appendix, most)
        written = markdown(shown, for_issue=True)
        if len(written.encode()) <= MAX_BYTES:
            return written
    return _cut(shown)


def _appendix(report: Report, appendix: Appendix, most: int) -> list[Block]:
    shown: list[Block] = [heading(2, "For sglang's maintainers")]
    if report.server_command:
        shown += [
            paragraph("The shortest command for this server:"),
            Fence((shortest_command(report.server_command),)),
        ]
    if appendix.script is not None:
        shown.append(Fold(f"The operator alone: {appendix.script_name}", (_fence(appendix.script, most),)))
    if appendix.environment is not None:
        inside = _fence(appendix.environment, most)
        shown.append(Fold("sglang's environment report", (inside,)))
    else:
        shown.append(paragraph(f"sglang's environment report is missing: {appendix.environment_missing}"))
    return shown


def _fence(content: str, most: int) -> Fence:
    lines, used = [], 0
    for line in content.split("\n"):
        used += len(line.encode()) + 1
        if used > most:
            lines.append("(cut)")
            break
        lines.append(line.rstrip())
    return Fence(tuple(lines))


def _cut(shown: Sequence[Block]) -> str:
    """As many whole blocks as fit; the last resort for one that is hostile in size."""
    note = paragraph("Cut here: the rest does not fit an issue. The JSON report has all.")
    kept: list[Block] = []
    for part in shown:
        if len(markdown([*kept, part, note], for_issue=True).encode()) > MAX_BYTES:
            continue
        kept.append(part)
    return markdown([*kept, note], for_issue=True)


def shortest_command(command: str) -> str:
    """The launch command without what only klbench's own use of it needs."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    kept: list[str] = []
    skip = 0
    for word in words:
        name = word.partition("=")[0]
        if skip:
            skip -= 1
        elif re.match(
            r"(KLBENCH_\w+|PYTHONPATH|OMP_NUM_THREADS|HF_HUB_OFFLINE|SGLANG_ENABLE_HEALTH\w*)=", word
        ):
            continue
        elif name in _OURS:
            skip = 0 if "=" in word else _OURS[name]
        else:
            kept.append(word)
    python = next((index for index, word in enumerate(kept) if word == "-m"), None)
    if python:
        kept[python - 1] = "python"
    return shlex.join(kept)
