"""Results for a person, on stdout. Everything shown may come from outside and is made visible.

helper             status    hits   tokens  differ  bit-equal  avg KL   max Δ
match              clean     0/32     4096       0          1  0        0
prefill_cache_hit  diverged  32/32    4096     512      0.875  1.4e-05  0.0308
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from klbench.cli import streams
from klbench.core.text import cache_hits, cell_width, counted, kl, visible, wrap
from klbench.core.verdict_words import verdict_in_words

_HELPER_COLUMNS = ("helper", "status", "hits", "tokens", "differ", "bit-equal", "avg KL", "max Δ")


def out(line: str = "") -> None:
    """One line of data."""
    streams.write(f"{visible(line)}\n".encode(errors="replace"))


def columns(names: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table whose columns are as wide as their widest cell."""
    cells = [[visible(name) for name in names], *([visible(str(cell)) for cell in row] for row in rows)]
    widths = [max(cell_width(row[index]) for row in cells) for index in range(len(names))]
    return [
        "  ".join(
            cell + " " * (width - cell_width(cell)) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in cells
    ]


def columns_or_blocks(names: Sequence[str], rows: Sequence[Sequence[object]], width: int) -> list[str]:
    """A table where it fits into `width` cells; else each row as a block, its first cell over the others."""
    lines = columns(names, rows)
    if max(map(cell_width, lines), default=0) <= width:
        return lines
    blocks: list[str] = []
    for first, *others in rows:
        said = [f"{name} {cell}" for name, cell in zip(names[1:], others, strict=True) if str(cell)]
        blocks += [
            *wrap(visible(str(first)), width),
            *wrap("  " + visible(" · ".join(said)), width, indent="  "),
        ]
    return blocks


def terminal_width() -> int:
    """Cells of the terminal that stdout is; without one a line may be as long as it is."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def run_lines(document: Mapping[str, Any]) -> list[str]:
    """A klbench.run/1 document for a person."""
    rows = [_helper_row(name, result) for name, result in document["helpers"].items()]
    lines = columns(_HELPER_COLUMNS, rows) if rows else ["no helper was run"]
    for name, result in document["helpers"].items():
        if reason := result.get("reason"):
            lines.append(f"{name}: {reason}")
    verdict = document["verdict"]
    if verdict.get("status") == "none":
        lines += ["", *said] if (said := _not_exercised_lines(document)) else []
    elif document["helpers"]:
        lines += ["", f"verdict: {verdict_in_words(verdict)}"]
        lines += [f"  {item.get('text', '')}" for item in verdict.get("evidence", [])]
        lines += [f"  next: {item.get('text', '')}" for item in verdict.get("next", [])]
    prompts = document["prompts"]
    if prompts:
        lines += [
            "",
            f"prompts: {prompts.get('count')} from {prompts.get('source')}, {prompts.get('sha256')}",
        ]
    return [*lines, f"session: {document['session']}"]


def _helper_row(name: str, result: Mapping[str, Any]) -> list[object]:
    if result.get("hits") is None:
        return [name, result.get("status"), "–", "–", "–", "–", "–", "–"]
    return [
        name,
        result.get("status"),
        cache_hits(name, result["hits"], int(result.get("requests") or 0)),
        result["tokens"],
        _shown(result.get("divergent_tokens")),
        _shown(result.get("bit_equal_fraction")),
        kl(result.get("avg_kl_div")),
        _shown(result.get("max_abs_dlogprob")),
    ]


def locate_lines(document: Mapping[str, Any]) -> list[str]:
    """A klbench.locate/1 document for a person."""
    lines: list[str] = []
    if document["helper"] is None:
        statuses = " · ".join(f"{name} {status}" for name, status in document["statuses"].items())
        # A divergence whose capture failed is something to locate; the error says why it was not.
        head = "not located" if "diverged" in document["statuses"].values() else "nothing to locate"
        lines.append(f"{head}: {statuses or 'no helper was run'}")
        lines += _not_exercised_lines(document)
    for finding in document["findings"]:
        lines += _finding_lines(finding)
    if document["helper"] is not None and not document["findings"]:
        lines.append("a divergence without an origin")
        if document["alignment"] and document["alignment"].get("reason"):
            lines.append(f"  {document['alignment']['reason']}")
    around = [row for row in document.get("around") or [] if isinstance(row, Mapping)]
    if around:
        names = list(dict.fromkeys(name for row in around for name in row))
        lines += ["", *columns(names, [[_shown(row.get(name)) for name in names] for row in around])]
    lines += [line for note in document.get("notes") or [] for line in ("", str(note))]
    if masked := document["masked"]:
        lines += ["", f"masked by an origin, not judged: {counted(len(masked), 'operator')}"]
    return [*lines, "", f"session: {document['session']}"]


def _not_exercised_lines(document: Mapping[str, Any]) -> list[str]:
    """What a clean result says nothing about, and the command that would tell."""
    lines = []
    for item in document.get("not_exercised") or []:
        lines.append(f"not exercised: {item.get('text')}")
        if command := item.get("command"):
            lines.append(f"  {command}")
    return lines


def _finding_lines(finding: Mapping[str, Any]) -> list[str]:
    positions = finding.get("positions") or {}
    parts = [
        f"{finding.get('grade')} {finding.get('kind')}",
        str(finding.get("module")),
        f"request {finding.get('request')} of {finding.get('helper')}",
        f"{finding.get('phase')} row {positions.get('first')}",
        counted(int(positions.get("count") or 0), "row"),
        *([f"rank {finding['rank']}"] if finding.get("rank") else []),
    ]
    lines = [" · ".join(parts) + (" · latent" if finding.get("latent") else "")]
    if len(finding.get("kinds") or []) > 1:
        lines.append(f"  the evidence leaves open: {', '.join(finding['kinds'])}")
    evidence = finding.get("evidence") or []
    sentences = [item.get("text", "") if isinstance(item, Mapping) else item for item in evidence]
    return lines + [f"  {sentence}" for sentence in sentences]


def _shown(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return str(value)
