"""`klbench census`: operators x M, which are batch-invariant.

operator                               class              1  2  3  4  8  16  32  64  127  first M  max ulps
model.layers.1.self_attn.o_proj        RowParallelLinear  ·  ·  ·  ·  ·  ·   ·   ≠   ≠    64       22

39 others keep their bits with 1 to 127 rows

A terminal that is too narrow for that gets a mark for each M side by side:

M: 1 2 3 4 8 16 32 64 127
operator                         by M       first M  max ulps
model.layers.1.self_attn.o_proj  ·······≠≠  64       22
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from klbench.cli import options as opt
from klbench.cli import table
from klbench.core.text import cell_width, visible, wrap

_SAME, _CHANGED, _NOT_TRIED = "·", "≠", ""
_LEAST_NAME = 12


@click.command(cls=opt.TargetCommand)
@opt.target_options
@opt.common_options
@click.option("--all", "show_all", is_flag=True, help="Print invariant operators too.")
@opt.json_option
def census(
    demo: str | None,
    model_path: str | None,
    url: str | None,
    json_place: str | None,
    session: Path | None,
    show_all: bool,
    **options: Any,
) -> int:
    """Call every stateless operator again with other row counts; exit code 1 when one changes its bits.

    With 1, 2, 3 and powers of two of the real rows of one prompt, in the server. Attention and recurrent
    operators read earlier rows and are left out; so is what cannot be cut by rows, with exit code 5 when
    nothing else is wrong.
    """
    start = opt.build_request(demo=demo, model_path=model_path, url=url, ready_by_default=True, **options)
    from klbench.cli import headless
    from klbench.session.bench import make_work

    plan = headless.Plan("census", show_all=show_all)
    return headless.execute(start, plan, session=session, json_place=json_place, make_work=make_work)


def lines(document: Mapping[str, Any], *, show_all: bool = False, width: int | None = None) -> list[str]:
    """A klbench.census/1 document for a person, for `width` columns; None for those of the terminal."""
    width = width or _terminal_width()
    operators = document["operators"]
    shown = [entry for entry in operators if show_all or entry["status"] == "not_invariant"]
    tried = document["tried_M"]
    found: list[str] = []
    if shown:
        ranks = len({entry["rank"] for entry in operators}) > 1
        drawn = _table(shown, tried, ranks)
        if width is not None and max(map(cell_width, drawn)) > width:
            drawn = _narrow_table(shown, tried, ranks, width)
        found += [*drawn, ""]
    summary = document["summary"]
    if summary["invariant"]:
        others = "others keep" if summary["not_invariant"] else "operators keep"
        found.append(f"{summary['invariant']} {others} their bits with 1 to {document['rows']} rows")
    for status in ("not_repeatable", "error", "skipped", "stateful"):
        found += _left_out(status, [entry for entry in operators if entry["status"] == status])
    if width is not None:
        found = [
            part for line in found for part in (wrap(line, width) if cell_width(line) > width else [line])
        ]
    return [*found, f"session: {document['session']}"]


def _terminal_width() -> int | None:
    """Columns of the terminal, or what COLUMNS says; None where the output goes to a file."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return None


def _table(shown: Sequence[Mapping[str, Any]], tried: Sequence[int], ranks: bool) -> list[str]:
    names = ["operator", "class", *map(str, tried), "first M", "max ulps", *(["rank"] if ranks else [])]
    rows = [[_name(entry), entry["class"], *_marks(entry, tried), *_numbers(entry, ranks)] for entry in shown]
    return table.columns(names, rows)


def _narrow_table(
    shown: Sequence[Mapping[str, Any]], tried: Sequence[int], ranks: bool, width: int
) -> list[str]:
    """Marks side by side and without the class; a name that is still too long loses its beginning."""
    names = ["by M", "first M", "max ulps", *(["rank"] if ranks else [])]
    rest: list[list[object]] = [
        ["".join(mark or " " for mark in _marks(entry, tried)), *_numbers(entry, ranks)] for entry in shown
    ]
    taken = sum(
        2 + max(cell_width(str(cell)) for cell in column) for column in zip(names, *rest, strict=True)
    )
    room = max(width - taken, _LEAST_NAME)
    rows = [[_end_of(_name(entry), room), *cells] for entry, cells in zip(shown, rest, strict=True)]
    return [f"M: {' '.join(map(str, tried))}", *table.columns(["operator", *names], rows)]


def _end_of(name: str, room: int) -> str:
    name = visible(name)
    if cell_width(name) <= room:
        return name
    while name and cell_width(name) > room - 1:
        name = name[1:]
    return f"…{name}"


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["module"]) + (f" (call {entry['call']})" if entry["call"] else "")


def _marks(entry: Mapping[str, Any], tried: Sequence[int]) -> list[str]:
    own, changed = entry["tried_M"], entry["changed_M"]
    return [_NOT_TRIED if m not in own else _CHANGED if m in changed else _SAME for m in tried]


def _numbers(entry: Mapping[str, Any], ranks: bool) -> list[object]:
    first, ulps = entry["first_M"], entry["ulp_max"]
    numbers = ["–" if first is None else first, "–" if ulps is None else ulps]
    return [*numbers, entry["rank"]] if ranks else numbers


def _left_out(status: str, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Operators that were not judged, by reason."""
    said = {
        "not_repeatable": "not repeatable",
        "error": "failed when called again",
        "skipped": "not called again",
        "stateful": "not called again, for they have a state",
    }[status]
    by_reason: dict[str, list[str]] = {}
    for entry in entries:
        by_reason.setdefault(str(entry["reason"] or ""), []).append(entry["module"])
    return [
        f"{len(modules)} {said}: {reason} ({modules[0]}{', ...' if len(modules) > 1 else ''})"
        for reason, modules in by_reason.items()
    ]
