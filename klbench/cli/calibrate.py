"""`klbench calibrate`: the noise floor of a path, and the threshold that it honestly allows.

helper             averages    prefill/prefill  decode/decode  threshold  false alarms
match              0, 0, 0     0 differ         0 differ       1e-09      0
match: 3 passes measure exactly 0 and repeat bit for bit: 1e-09 nats is honest
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from klbench.cli import options as opt
from klbench.cli import table
from klbench.core.text import kl


@click.command(cls=opt.TargetCommand)
@opt.target_options
@opt.common_options
@click.option(
    "--passes",
    type=click.IntRange(2, 1000),
    default=3,
    show_default=True,
    metavar="N",
    help="How often the helpers are run.",
)
@opt.json_option
def calibrate(
    demo: str | None,
    model_path: str | None,
    url: str | None,
    json_place: str | None,
    session: Path | None,
    passes: int,
    **options: Any,
) -> int:
    """Repeat the helpers and propose a threshold: 1e-9 where the path measures zero.

    Otherwise the measured floor, how often it would give a false alarm, and what must be mended first. Kept
    by model, ranks, dtype, backend, GPU and sglang version. Exit code 1 when the floor is not zero.
    """
    start = opt.build_request(demo=demo, model_path=model_path, url=url, **options)
    from klbench.cli import headless
    from klbench.session.bench import make_work

    plan = headless.Plan("calibrate", passes=passes)
    return headless.execute(start, plan, session=session, json_place=json_place, make_work=make_work)


def lines(document: Mapping[str, Any]) -> list[str]:
    """A klbench.calibrate/1 document for a person."""
    rows, sentences = [], []
    for name, helper in document["helpers"].items():
        proposal = helper.get("proposal")
        averages = ", ".join(kl(value) for value in helper["averages"]) or "–"
        if proposal is None:
            rows.append([name, averages, "–", "–", "–", "–"])
            sentences.append(f"{name}: {helper.get('reason') or ', '.join(helper['statuses'])}")
            continue
        rows.append(
            [
                name,
                averages,
                f"{helper['prefill_against_prefill']['differing']} differ",
                f"{helper['decode_against_decode']['differing']} differ",
                kl(proposal["threshold"]),
                "–" if proposal["false_alarm_rate"] is None else f"{proposal['false_alarm_rate']:.0%}",
            ]
        )
        sentences.append(f"{name}: {proposal['sentence']}")
        if proposal["first"]:
            sentences.append(f"{name}: first: {proposal['first']}")
    names = ("helper", "averages", "prefill/prefill", "decode/decode", "threshold", "false alarms")
    return [*table.columns(names, rows), *sentences, f"session: {document['session']}"]
