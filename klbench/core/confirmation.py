"""When a finding is confirmed, and what is missing where it is not.

A finding that is `probable` becomes `confirmed` only when all of this holds:

- the divergence still shows under capture settings, and capture changed no logprob;
- every forward of the request was made of the same rows as in the measured run;
- a repeat of the capture gave the same origin;
- the evidence leaves a single kind;
- a stateless operator, called again alone on its own rows, gives other bits with the row count of one arm
  than with that of the other; or the equal-M arm gives other bits with one row in both, unless it is given a
  cache, whose content was not compared. One that reads state cannot be called again like that: its equal
  state stands for it, or where nobody saw the state what was recomputed (recomputed.py).

Nothing is ever raised from `unknown`, and a latent finding is left as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from klbench.core.census import OperatorReplay
from klbench.core.findings import Evidence, Finding
from klbench.core.recomputed import verdict
from klbench.core.text import counted


@dataclass(frozen=True, slots=True)
class Experiment:
    """How much the capture was the measured experiment, and what a repeat of it found."""

    symptom_shows: bool
    changed_logprobs: int
    compared_logprobs: int
    same_batches: bool | None
    """None where the measured run's forwards are not known."""
    repeat: tuple[Finding, ...] | None
    """The repeat's findings; None where there was none, for `no_repeat`."""
    no_repeat: str = ""


def same_origin(a: Finding, b: Finding) -> bool:
    """Whether two captures blame the same point: kind, operator, arm, rank and first row.

    Where the first was recomputed its kind is one of those that the other, which was not, leaves open.
    """
    same_kind = a.kind == b.kind or (verdict(a) is not None and a.kind in b.kinds)
    return same_kind and _place(a) == _place(b)


def _place(finding: Finding) -> tuple[object, ...]:
    return (
        finding.module,
        finding.call,
        finding.rank,
        finding.arm,
        finding.first_position,
        finding.latent,
    )


def may_be_confirmed(finding: Finding) -> bool:
    """Whether a repeat and a replay could raise its grade."""
    return finding.grade == "probable" and not finding.latent and len(finding.kinds) == 1


def wants_replay(finding: Finding) -> bool:
    """Whether it blames an operator that might be called again alone."""
    if any(fact.code == "state_probe" for fact in finding.evidence):
        # It names layers, and there is no operator to call again.
        return False
    functions = finding.kind == "head" and finding.module in ("lm_head", "logprob")
    return (finding.kind == "operator" or functions) and not finding.latent


def reads_state(finding: Finding) -> bool:
    """Whether it blames the arithmetic of an operator that reads state: it cannot be called again alone."""
    stateful = {"state_equal", "history_equal", "history_not_observed"}
    return finding.kind == "operator" and any(fact.code in stateful for fact in finding.evidence)


def wants_equal_m(finding: Finding) -> bool:
    """Whether the equal-M arm says more: it reads state, or called again alone its row count does not matter,
    or it cannot be called again.

    The operators of the head have no row in a one-token extend that a decode step has, too.
    """
    if finding.latent or finding.kind != "operator":
        return False
    return reads_state(finding) or any(
        fact.code == "replay_invariant" or (fact.code == "not_replayed" and _is_uncallable(fact))
        for fact in finding.evidence
    )


def _is_uncallable(fact: Evidence) -> bool:
    """Whether it could not be called again as such; one that gave other bits each time was called."""
    return fact.values.get("status") in ("stateful", "skipped", "error")


def wants_row_counts(finding: Finding) -> bool:
    """Whether forwards of other row counts say more: there is no operator to call again alone, and no
    recomputation has told rounding from another function."""
    if finding.latent or len(finding.kinds) != 1:
        return False
    return finding.kind == "gap" or (reads_state(finding) and verdict(finding) in (None, "unknown"))


def equal_m(finding: Finding) -> str | None:
    """The outcome of the equal-M arm, None where it was not made."""
    found = (fact.values.get("outcome") for fact in finding.evidence if fact.code == "equal_m")
    return next((str(outcome) for outcome in found), None)


def arm_rows(finding: Finding) -> tuple[int, ...]:
    """How many rows shared the operator's call in each of the two arms, as far as the evidence says."""
    # The head's calls hold the rows that need logits, not those of the forward.
    name = "head_rows" if finding.kind == "head" else "batch_rows"
    for fact in finding.evidence:
        rows = fact.values.get(name)
        if fact.code == "origin" and isinstance(rows, list):
            return tuple(int(count) for count in rows)
    return ()


def with_replay(finding: Finding, replayed: OperatorReplay | None, reason: str = "") -> Finding:
    """The finding with `replay_m` and what the replay says; `reason` why there is none."""
    if replayed is None:
        fact = Evidence("not_replayed", f"It was not called again alone: {reason}.", {})
    elif not replayed.answered:
        text = f"It could not be called again alone: {replayed.reason or replayed.status}."
        fact = Evidence("not_replayed", text, {"status": replayed.status})
    else:
        fact = _replayed(finding, replayed)
    first = replayed.first_changed if replayed is not None else None
    return dataclasses.replace(finding, replay_m=first, evidence=(*finding.evidence, fact))


def _replayed(finding: Finding, replayed: OperatorReplay) -> Evidence:
    values = {
        "tried_M": list(replayed.tried),
        "changed_M": list(replayed.changed),
        "arms_M": list(arm_rows(finding)),
        "arms_differ": arms_differ(finding, replayed),
        "ulp_max": replayed.damage.ulp_max if replayed.damage else None,
    }
    row = f"the row at position {finding.first_position}"
    if replayed.first_changed is None:
        text = (
            f"Called again alone on its own rows it gives {row} the same bits with each of "
            f"{_listed(replayed.tried)} rows: the row count alone does not make the difference"
            f"{f' ({replayed.reason})' if replayed.reason else ''}."
        )
        return Evidence("replay_invariant", text, values)
    below = [m for m in replayed.tried if m < replayed.first_changed]
    text = (
        f"Called again alone on its own rows it gives {row} the same bits with {_listed(below)} rows and "
        f"others from {replayed.first_changed} rows on"
    )
    if replayed.damage is not None:
        text += f", by at most {counted(replayed.damage.ulp_max, 'ulp')}"
    return Evidence("replay_changes", text + ".", values)


def _listed(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows))


def arms_differ(finding: Finding, replayed: OperatorReplay) -> bool | None:
    """Whether the row counts of the two arms give different bits; None where both were not tried."""
    counts = arm_rows(finding)
    if len(counts) != 2 or not all(count in replayed.tried for count in counts):
        return None
    a, b = (replayed.tried.index(count) for count in counts)
    return any(row[a] != row[b] for row in replayed.variants)


def confirmed(finding: Finding, experiment: Experiment, replayed: OperatorReplay | None) -> Finding:
    """The finding, `confirmed` if all holds; otherwise as it is, with what is missing."""
    if finding.latent or finding.grade != "probable":
        return finding
    missing = _missing(finding, experiment, replayed)
    if not missing:
        text = (
            "Confirmed: it shows again under capture, which changed none of "
            f"{experiment.compared_logprobs} logprobs, in the same batches; a second capture gave the same "
            f"origin{_shown_alone(finding)}."
        )
        fact = Evidence("confirmed", text, {"compared_logprobs": experiment.compared_logprobs})
        return dataclasses.replace(finding, grade="confirmed", evidence=(*finding.evidence, fact))
    fact = Evidence(
        "not_confirmed",
        "Not confirmed: " + "; ".join(text for _, text in missing) + ".",
        {"missing": [code for code, _ in missing]},
    )
    return dataclasses.replace(finding, evidence=(*finding.evidence, fact))


def _shown_alone(finding: Finding) -> str:
    if finding.replay_m is not None:
        return "; the operator alone shows it too"
    if any(fact.values.get("outcome") == "changes" for fact in finding.evidence if fact.code == "row_counts"):
        return "; forwards that differ in their row count alone show it too"
    return "; it shows with one row in both forwards, too" if equal_m(finding) == "differs" else ""


def _missing(
    finding: Finding, experiment: Experiment, replayed: OperatorReplay | None
) -> list[tuple[str, str]]:
    missing = []
    if len(finding.kinds) != 1:
        missing.append(("several_kinds", f"the evidence leaves {', '.join(finding.kinds)}"))
    if not experiment.symptom_shows:
        missing.append(("symptom_gone", "the divergence did not show under capture"))
    if experiment.changed_logprobs or not experiment.compared_logprobs:
        missing.append(("logprobs", "capture is not proved to change no logprob"))
    if experiment.same_batches is not True:
        missing.append(("other_batch", "the batches are not proved to be those of the measured run"))
    if experiment.repeat is None:
        missing.append(("no_repeat", f"it was not repeated ({experiment.no_repeat or 'no reason given'})"))
    elif not any(same_origin(finding, other) for other in experiment.repeat):
        missing.append(("repeat_differs", "a second capture did not give the same origin"))
    if wants_replay(finding):
        missing += _replay_missing(finding, replayed)
    return missing


def _replay_missing(finding: Finding, replayed: OperatorReplay | None) -> list[tuple[str, str]]:
    if replayed is None:
        return [("not_replayed", "the operator was not called again alone")]
    if replayed.status == "stateful" and reads_state(finding):
        return []
    if equal_m(finding) == "differs" and replayed.status not in ("not_repeatable", "stateful"):
        # It needs neither other rows nor more of them: what it is told beside its inputs decides.
        return []
    if not replayed.answered:
        return [("not_replayed", "the operator could not be called again alone")]
    if finding.module == "logprob":
        # Two functions compute it, one in each arm: called again, one of them cannot show what differs.
        return []
    differ = arms_differ(finding, replayed)
    if differ is False or (differ is None and replayed.first_changed is None):
        return [("replay", "the operator alone gives the same bits with the row counts of both arms")]
    if differ is None:
        return [("arms_not_tried", "the operator alone was not tried with the row counts of both arms")]
    return []
