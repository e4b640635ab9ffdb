"""`klbench census`: operators x M, which are batch-invariant.

operator                               class              1  2  3  4  8  16  32  64  127  first M  max ulps
model.layers.1.self_attn.o_proj        RowParallelLinear  ·  ·  ·  ·  ·  ·   ·   ≠   ≠    64       22

39 others keep their bits with 1 to 127 rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from klbench.cli import options as opt
from klbench.cli import table

_SAME, _CHANGED, _NOT_TRIED = "·", "≠", ""


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
    """Call every stateless operator again with 1, 2, 3, ... rows; exit code 1 when one changes its bits.

    On real rows of one prompt, in the server. Attention and recurrent operators read earlier rows and are
    left out; so is what cannot be cut by rows, with exit code 5 when nothing else is wrong.
    """
    start = opt.build_request(demo=demo, model_path=model_path, url=url, ready_by_default=True, **options)
    from klbench.cli import headless
    from klbench.session.bench import make_work

    plan = headless.Plan("census", show_all=show_all)
    return headless.execute(start, plan, session=session, json_place=json_place, make_work=make_work)


def lines(document: Mapping[str, Any], *, show_all: bool = False) -> list[str]:
    """A klbench.census/1 document for a person."""
    operators = document["operators"]
    shown = [entry for entry in operators if show_all or entry["status"] == "not_invariant"]
    tried = document["tried_M"]
    found: list[str] = []
    if shown:
        ranks = len({entry["rank"] for entry in operators}) > 1
        names = ["operator", "class", *map(str, tried), "first M", "max ulps", *(["rank"] if ranks else [])]
        rows = [[*_row(entry, tried), *([entry["rank"]] if ranks else [])] for entry in shown]
        found += [*table.columns(names, rows), ""]
    summary = document["summary"]
    if summary["invariant"]:
        others = "others keep" if summary["not_invariant"] else "operators keep"
        found.append(f"{summary['invariant']} {others} their bits with 1 to {document['rows']} rows")
    for status in ("not_repeatable", "error", "skipped", "stateful"):
        found += _left_out(status, [entry for entry in operators if entry["status"] == status])
    return [*found, f"session: {document['session']}"]


def _row(entry: Mapping[str, Any], tried: Sequence[int]) -> list[object]:
    own, changed = entry["tried_M"], entry["changed_M"]
    cells = [_NOT_TRIED if m not in own else _CHANGED if m in changed else _SAME for m in tried]
    name = entry["module"] + (f" (call {entry['call']})" if entry["call"] else "")
    first, ulps = entry["first_M"], entry["ulp_max"]
    return [name, entry["class"], *cells, "–" if first is None else first, "–" if ulps is None else ulps]


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
