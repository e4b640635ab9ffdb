"""Confirms what a capture found: replays the blamed operators, captures once more, weighs it all.

    outcome = await confirm(side, outcome, trace_dir=folder)

Needs the same server as the capture. A step that fails is a missing proof, not an error: the grade stays and
the finding says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from klbench.core.census import OperatorReplay, largest_prime, row_counts
from klbench.core.confirmation import (
    Experiment,
    arm_rows,
    confirmed,
    may_be_confirmed,
    wants_equal_m,
    wants_replay,
    wants_row_counts,
    with_replay,
)
from klbench.core.findings import Finding
from klbench.engine.capture import Beforehand, Outcome, Progress, capture
from klbench.engine.captured_work import ServerSide, Work
from klbench.engine.equal_m import try_equal_m
from klbench.engine.progress import ArmObserver
from klbench.engine.replay import replay
from klbench.engine.row_counts import try_row_counts
from klbench.errors import KlbenchError

_REPLAYED = 4
"""Findings whose operator is replayed."""
_DEFAULT_ROWS = 256
KEEP_BYTES = 64 << 20
"""Inputs and weights kept of one replayed operator, for an export."""


async def confirm(
    side: ServerSide,
    outcome: Outcome,
    *,
    trace_dir: Path,
    observe: ArmObserver | None = None,
    progress: Progress | None = None,
    beforehand: Beforehand | None = None,
) -> Outcome:
    """`outcome` with replays in its findings and the grades that the proofs allow.

    `trace_dir` keeps the replays, below the trace's folder, and the trace of the repeat.
    """
    say = progress or _say_nothing
    findings = list(outcome.findings)
    replays: dict[int, OperatorReplay] = {}
    wanted = [number for number, finding in enumerate(findings) if wants_replay(finding)][:_REPLAYED]
    for place, number in enumerate(wanted):
        say("replaying the operator", place, len(wanted))
        try:
            found = await _replayed(side, outcome, findings[number], number)
        except KlbenchError as error:
            reason = ": ".join(part for part in (error.what, error.why) if part)
            findings[number] = with_replay(findings[number], None, reason)
            continue
        replays[number] = found
        findings[number] = with_replay(findings[number], found)
    if outcome.symptom_shows and outcome.backend == "digest":
        findings = await _arms_of_its_own(side, outcome, findings, say)
    repeat: tuple[Finding, ...] | None = None
    no_repeat = "nothing was left to confirm by it"
    if outcome.symptom_shows and any(may_be_confirmed(finding) for finding in findings):
        say("capturing once more", 0, 1)
        try:
            again = await capture(
                side,
                outcome.work,
                trace_dir=trace_dir,
                backend=outcome.backend,
                numbers=False,
                observe=observe,
                progress=progress,
                beforehand=beforehand,
            )
            repeat = again.findings
        except KlbenchError as error:
            no_repeat = ": ".join(part for part in (error.what, error.why) if part)
    experiment = Experiment(
        symptom_shows=outcome.symptom_shows,
        changed_logprobs=outcome.changed_logprobs,
        compared_logprobs=outcome.compared_logprobs,
        same_batches=outcome.repetition.repeated if outcome.repetition is not None else None,
        repeat=repeat,
        no_repeat=no_repeat,
    )
    weighed = tuple(
        confirmed(finding, experiment, replays.get(number)) for number, finding in enumerate(findings)
    )
    return dataclasses.replace(
        outcome, localisation=dataclasses.replace(outcome.localisation, findings=weighed)
    )


async def _arms_of_its_own(
    side: ServerSide, outcome: Outcome, findings: list[Finding], say: Progress
) -> list[Finding]:
    """`findings` with what other forwards say of the first one that wants them: equal M, other row counts."""
    made = list(findings)
    for wants, ask, name, phase in (
        (wants_equal_m, try_equal_m, "equal-m", "the same row as decode and as a one-token extend"),
        (wants_row_counts, try_row_counts, "row-counts", "the same rows in forwards of other row counts"),
    ):
        number = next((place for place, finding in enumerate(made) if wants(finding)), None)
        if number is None:
            continue
        say(phase, 0, 1)
        folder = outcome.trace_dir.with_name(f"{outcome.trace_dir.name}-{name}")
        fact = await ask(side, outcome.work, made[number], folder=folder)
        made[number] = dataclasses.replace(made[number], evidence=(*made[number].evidence, fact))
    return made


def _say_nothing(phase: str, done: int, total: int) -> None:
    pass


async def _replayed(side: ServerSide, outcome: Outcome, finding: Finding, number: int) -> OperatorReplay:
    """The blamed call replayed on the request's own rows. Raises KlbenchError."""
    counts = arm_rows(finding)
    tokens = carrier_tokens(outcome.work, finding.first_position)
    found = await replay(
        side,
        tokens,
        folder=replay_folder(outcome.trace_dir, number),
        rows={*row_counts(max((*counts, len(tokens), _DEFAULT_ROWS))), *counts},
        modules=[finding.module],
        wrap=True,
        position=finding.first_position,
        keep_bytes=KEEP_BYTES,
    )
    return pick(found, finding)


def replay_folder(trace_dir: Path, number: int) -> Path:
    """Where the replay of the finding with this number is kept, beside its trace."""
    return trace_dir.with_name(f"{trace_dir.name}-replay-{number}")


def pick(found: Sequence[OperatorReplay], finding: Finding) -> OperatorReplay:
    """The replay of the finding's call. Raises KlbenchError where the model has no such call."""
    for replayed in found:
        if (replayed.module, replayed.call, replayed.rank) == (finding.module, finding.call, finding.rank):
            return replayed
    raise KlbenchError(f"{finding.module} was not called by itself in the carrier's forward")


def carrier_tokens(work: Work, position: int) -> list[int]:
    """The request's own tokens, prompt and output, up to a prime number of them that covers `position`."""
    measured = work.measured
    output = measured.token_id[measured.tokens_of(work.request)]
    tokens = [int(token) for token in (*measured.prompt_of(work.request), *output)]
    rows = largest_prime(len(tokens))
    return tokens[:rows] if rows > position else tokens
