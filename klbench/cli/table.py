"""Results for a person, on stdout. Everything shown may come from outside and is made visible.

helper             status    hits   tokens  differ  bit-equal  avg KL   max Δ
match              clean     0/32     4096       0          1  0        0
prefill_cache_hit  diverged  32/32    4096     512      0.875  1.4e-05  0.0308
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from klbench.core.text import cache_hits, cell_width, kl, visible

_HELPER_COLUMNS = ("helper", "status", "hits", "tokens", "differ", "bit-equal", "avg KL", "max Δ")


def out(line: str = "") -> None:
    """One line of data."""
    sys.stdout.write(visible(line) + "\n")


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


def run_lines(document: Mapping[str, Any]) -> list[str]:
    """A klbench.run/1 document for a person."""
    lines = columns(
        _HELPER_COLUMNS, [_helper_row(name, result) for name, result in document["helpers"].items()]
    )
    for name, result in document["helpers"].items():
        if reason := result.get("reason"):
            lines.append(f"{name}: {reason}")
    verdict = document["verdict"]
    if verdict.get("status") != "none" and document["helpers"]:
        conditions = ", ".join(verdict.get("conditions") or []) or str(verdict.get("status"))
        lines += ["", f"verdict: {conditions} · {verdict.get('grade')}"]
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
        lines.append(f"nothing to locate: {statuses or 'no helper was run'}")
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
    if masked := document["masked"]:
        lines += ["", f"masked by an origin, not judged: {len(masked)} operators"]
    return [*lines, "", f"session: {document['session']}"]


def _finding_lines(finding: Mapping[str, Any]) -> list[str]:
    positions = finding.get("positions") or {}
    parts = [
        f"{finding.get('grade')} {finding.get('kind')}",
        str(finding.get("module")),
        f"request {finding.get('request')} of {finding.get('helper')}",
        f"{finding.get('phase')} row {positions.get('first')}",
        f"{positions.get('count')} rows",
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
