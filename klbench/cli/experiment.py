"""`klbench experiment NAME...`: what tells two explanations apart, as a matrix.

experiment  outcome         reading
repeats     same_bits       5 repeats with equal batches are bit-identical; a race of more than 45% a run ...
                            no race showed in so many repeats; the divergence is logic or arithmetic
graphs      not_possible    not possible here: a CPU server replays no CUDA graphs: there is nothing to switch

plan: 5 runs of prefill_cache_hit, no relaunch
verdict: found: different function (condition 2) · probable
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from klbench.cli import options as opt
from klbench.cli import table
from klbench.core.text import counted, elapsed
from klbench.core.verdict_words import verdict_in_words


class _ExperimentCommand(opt.TargetCommand):
    """Lists the experiments below its options."""

    def format_epilog(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        from klbench.core.experiments import CATALOGUE

        with formatter.section("Experiments"):
            formatter.write_dl([(e.name, f"{e.title}: {e.question}") for e in CATALOGUE.values()])


@click.command(cls=_ExperimentCommand)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@opt.target_options
@opt.common_options
@click.option(
    "--max-relaunches",
    type=click.IntRange(0),
    metavar="N",
    help="Agree to so many starts of the server. Default: as many as take 60 s.",
)
@opt.json_option
def experiment(
    names: tuple[str, ...],
    demo: str | None,
    model_path: str | None,
    url: str | None,
    json_place: str | None,
    session: Path | None,
    max_relaunches: int | None,
    **options: Any,
) -> int:
    """Run the helpers, then change one thing at a time and compare bit for bit.

    pad takes the striking residue of the run, or one that is named: pad:cached_tokens%8=3.

    Exit code 1 when something diverges or repeats differ, else 5 when an experiment has no answer.
    """
    start = opt.build_request(demo=demo, model_path=model_path, url=url, **options)
    from klbench.cli import headless
    from klbench.session.bench import make_work
    from klbench.session.experimenting import known_experiments

    helpers = start.options.helpers
    plan = headless.Plan(
        "experiment",
        helper=helpers[0] if len(helpers) == 1 else None,
        experiments=known_experiments(names),
        max_relaunches=max_relaunches,
    )
    return headless.execute(start, plan, session=session, json_place=json_place, make_work=make_work)


def lines(document: Mapping[str, Any]) -> list[str]:
    """A klbench.experiment/1 document for a person."""
    rows: list[list[object]] = []
    for made in document["experiments"]:
        rows.append([made.get("name"), made.get("outcome"), made.get("text")])
        if made.get("meaning") and made.get("outcome") != "not_possible":
            rows.append(["", "", made["meaning"]])
    found = table.columns(("experiment", "outcome", "reading"), rows) if rows else ["no experiment was made"]
    plan = document.get("plan") or {}
    for name, prediction in (plan.get("predictions") or {}).items():
        found += ["", f"predicted of {name}: {prediction}"]
    if plan:
        estimate = plan.get("estimate_s")
        about = f", about {elapsed(estimate)}" if isinstance(estimate, int | float) else ""
        launches = plan.get("launches") or 0
        passes = sum(step.get("passes", 0) for step in plan.get("steps", ()))
        found += [
            "",
            f"plan: {counted(passes, 'run')} of {document.get('helper') or 'a helper'}, "
            f"{launches or 'no'} {'relaunch' if launches in (0, 1) else 'relaunches'}{about}",
        ]
    verdict = document.get("verdict")
    if verdict:
        found.append(f"verdict: {verdict_in_words(verdict)}")
    return [*found, f"session: {document['session']}"]
