"""What a recomputation in float64 says of a finding, and what it leaves of its kinds.

An attention is judged by attention_reference.py, a gated delta rule by delta_rule_reference.py: their verdict
stands in the finding's evidence, under the name of the module that gave it.
"""

from __future__ import annotations

import dataclasses

from klbench.core.attention_reference import Judgement
from klbench.core.findings import Evidence, Finding, Kind
from klbench.core.text import counted

ATTENTION = "attention_reference"
DELTA_RULE = "delta_rule_reference"
RECOMPUTED = (ATTENTION, DELTA_RULE)
"""Codes of evidence whose values hold a verdict."""
FUNCTIONS = ("missing_key", "extra_key", "other_function")
"""Verdicts that are no rounding."""
_OF_STATE: tuple[Kind, ...] = ("state_restore", "state_write")
_STATE_UNSEEN = ("history_not_observed", "history_equal")
"""Evidence of kinds that are open because the state was not seen as it was read."""


def verdict(finding: Finding) -> str | None:
    """What the recomputation of its operator says, None where there was none."""
    found = (fact.values.get("verdict") for fact in finding.evidence if fact.code in RECOMPUTED)
    return next((str(said) for said in found), None)


def with_judgement(finding: Finding, code: str, judged: Judgement, more: str = "") -> Finding:
    """The finding with the judgement as evidence, and with what follows from it as `more`."""
    text = f"{judged.sentence[0].upper()}{judged.sentence[1:]}{more}."
    fact = Evidence(code, text, judged.as_dict())
    return dataclasses.replace(finding, evidence=(*finding.evidence, fact))


def state_unseen(finding: Finding) -> bool:
    """Whether its kinds are open because the state that was read was not seen."""
    return any(fact.code in _STATE_UNSEEN for fact in finding.evidence)


def may_be_recomputed(finding: Finding) -> bool:
    """Whether it blames an operator, or the state that it read and that nobody saw."""
    unseen = finding.kind in _OF_STATE and state_unseen(finding)
    return not finding.latent and "operator" in finding.kinds and (finding.kind == "operator" or unseen)


def with_recurrence(finding: Finding, judged: Judgement) -> Finding:
    """The finding after its recurrence was recomputed from row 0 on.

    Where both arms fit, the state was right in both, whatever was restored: what is left is the operator.
    Where one does not, it went on from another state, wrote another, or the operator computes something else;
    but it was looked at, and is no longer unobserved. Either stands for the state that was not seen.
    """
    if judged.verdict not in ("rounding", "other_function"):
        return with_judgement(finding, DELTA_RULE, judged)
    codes = {fact.code for fact in finding.evidence}
    kinds: tuple[Kind, ...]
    if judged.verdict == "rounding":
        kinds = ("operator",)
        more = ": the state that they went on from was right, and they only round otherwise"
        if (later := finding.count - judged.rows) > 0:
            more += (
                f"; {counted(later, 'later row')} of the finding {'was' if later == 1 else 'were'} not judged"
            )
    else:
        state = tuple(kind for kind in finding.kinds if kind in _OF_STATE)
        # The scoring arm restores nothing, and prefill writes what it has just computed.
        kinds = (*state, "operator") if judged.side == "generation" else ("operator", *state)
        more = ": it went on from another state, or computes something else" if state else ""
    grade = finding.grade
    if "history_not_observed" in codes and grade == "unknown":
        grade = "probable"
    if "ranks_not_compared" in codes:
        kinds = (*kinds, "not_observed")
    return with_judgement(dataclasses.replace(finding, kinds=kinds, grade=grade), DELTA_RULE, judged, more)
