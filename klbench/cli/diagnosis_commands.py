"""The commands that lead from numbers to a verdict: what each takes; the modules of their names do them."""

from __future__ import annotations

import click

from klbench.cli import options as opt
from klbench.cli.completing import complete_sessions


@click.command()
@click.argument("step", required=False)
@click.option(
    "--session", metavar="SESSION", shell_complete=complete_sessions, help="Where this session stands."
)
@click.option("--terms", is_flag=True, help="Explain the words instead.")
@opt.json_option
def guide(step: str | None, session: str | None, terms: bool, json_place: str | None) -> int:
    """Explain the path from "KL too high" to "this operator, because of that", or one STEP of it."""
    from klbench.cli.guide import show_guide

    return show_guide(step, session, terms, json_place)
