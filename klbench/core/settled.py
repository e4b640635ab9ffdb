"""What findings and experiments settle: they may confirm what a run alone only suspects.

A finding of `klbench locate` confirms a condition only if it is confirmed itself and its evidence admits no
other (finding_condition.py); one of grade `unknown` names none, unless it is a copy that went wrong. An
experiment confirms a condition where its outcome has one meaning. What contradicts a hypothesis stands
against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from klbench.core.experiments import DIFFERS, MOVED, PREDICTED, SAME, VANISHED
from klbench.core.finding_condition import (
    condition_of_finding,
    does_not_repeat,
    is_beside_the_state,
    is_rounding,
    is_wrong_copy,
    only_rows_are_left,
    rows_do_not_matter,
)
from klbench.core.hypotheses import BATCH_INVARIANCE, DIFFERENT_FUNCTION, RACE, Hypothesis
from klbench.core.scene import Fact, Scene, cold_in_chunks, hits_only

Outcomes = Sequence[Mapping[str, Any]]

_EXPLAINED: dict[str, tuple[str, str]] = {
    BATCH_INVARIANCE: ("row_count", "an operator's result depends on how many rows share its forward"),
    DIFFERENT_FUNCTION: ("other_function", "decode and prefill do not compute the same function"),
    RACE: ("race", "a race: what is read depends on when it was written"),
}


def settle(
    hypotheses: Sequence[Hypothesis],
    scene: Scene,
    findings: Sequence[Mapping[str, Any]],
    outcomes: Outcomes,
) -> list[Hypothesis]:
    """The hypotheses after what `klbench locate` found and what experiments showed."""
    judged = list(hypotheses)
    counted = [finding for finding in findings if not finding.get("latent")]
    for finding in counted:
        judged = _after_finding(judged, finding)
    for outcome in outcomes:
        judged = _after_outcome(judged, outcome, scene, counted)
    return judged


def _after_finding(hypotheses: list[Hypothesis], finding: Mapping[str, Any]) -> list[Hypothesis]:
    condition, why, certain = condition_of_finding(finding)
    grade = str(finding.get("grade") or "unknown")
    if grade == "confirmed" and not certain:
        grade = "probable"
    unsteady = does_not_repeat(finding)
    retracted = any(h.code == "retraction" for h in hypotheses)
    if grade == "unknown" and is_wrong_copy(finding) and (unsteady is None or retracted):
        # What does not repeat itself may be a race; but given-back slots hold something else each time.
        grade = "probable"
        why += "; a copy does no arithmetic, so it is no rounding in whichever batch"
    fact = Fact(
        "finding",
        f"located ({finding.get('grade')}): {why}",
        {"module": finding.get("module"), "kinds": list(finding.get("kinds") or ()), "grade": grade},
    )
    if unsteady is not None:
        moved = Fact("does_not_repeat", unsteady)
        hypotheses = _after_other_bits(hypotheses, moved, "probable")
    if rows_do_not_matter(finding):
        if condition is None:
            return _by_other_rows_or_function(hypotheses, finding, fact)
        hypotheses = [_lowered(h, fact) if h.code == "row_count" else h for h in hypotheses]
    if condition is None:
        return [h.with_for(fact) if BATCH_INVARIANCE in h.conditions else h for h in hypotheses]
    restored = "state_restore" in (finding.get("kinds") or [finding.get("kind")])
    if grade not in ("confirmed", "probable"):
        return [h.with_for(fact) if condition in h.conditions else h for h in hypotheses]
    preferred = "wrong_restore" if restored else None
    return _settled(hypotheses, condition, grade, fact, preferred)


def _by_other_rows_or_function(
    hypotheses: list[Hypothesis], finding: Mapping[str, Any], fact: Fact
) -> list[Hypothesis]:
    """An operator whose row count does not matter: sent alone, the request has no other rows beside it."""
    judged = [h.with_against(fact) if h.code == "row_count" else h for h in hypotheses]
    if not only_rows_are_left(finding):
        return judged
    functions = [h for h in judged if h.conditions == (DIFFERENT_FUNCTION,)]
    if not functions:
        text = _EXPLAINED[DIFFERENT_FUNCTION][1]
        other = Hypothesis("other_function", text, (DIFFERENT_FUNCTION,), "unknown", 50, (fact,), (), "alone")
        return [*judged, other]
    best = max(functions, key=lambda h: (h.grade == "probable", h.weight))
    return [replace(h, next="alone").with_for(fact) if h is best else h for h in judged]


def _settled(
    hypotheses: list[Hypothesis], condition: str, grade: str, fact: Fact, preferred: str | None = None
) -> list[Hypothesis]:
    """Raises the best hypothesis of one condition to `grade`; the others of it stand as they are."""
    candidates = [h for h in hypotheses if condition in h.conditions]
    chosen = next((h for h in candidates if h.code == preferred), None)
    if chosen is None and candidates:
        chosen = max(candidates, key=lambda h: (h.grade == "confirmed", h.grade == "probable", h.weight))
    if chosen is None:
        code, text = _EXPLAINED[condition]
        return [*hypotheses, Hypothesis(code, text, (condition,), grade, 90, (fact,), (), "locate")]
    # A probable finding is no worse evidence than a signature, and never lowers what is confirmed.
    best = "confirmed" if "confirmed" in (grade, chosen.grade) else "probable"
    raised = replace(chosen, grade=best, conditions=(condition,), weight=chosen.weight + 50).with_for(fact)
    return [raised if h is chosen else h for h in hypotheses]


def _after_other_bits(hypotheses: list[Hypothesis], fact: Fact, grade: str) -> list[Hypothesis]:
    """Equal batches gave other bits: a race, but for requests that were computed again in given-back slots.

    What such a slot held before is not the same in each run, so state that was left in it moves as a race
    does. How many rows share a forward does not: the batches were equal.
    """
    if not any(h.code == "retraction" for h in hypotheses):
        if grade == "confirmed":
            return _settled(hypotheses, RACE, grade, fact)
        return [_raised(h, fact) if h.code == "race" else h for h in hypotheses]
    doubt = Fact(
        "earlier_owner",
        "all that diverges was computed again after a retraction, and what its new slots held before is not "
        "the same in each run: state that is left there moves like a race",
    )
    judged = []
    for hypothesis in hypotheses:
        if hypothesis.code == "race":
            judged.append(hypothesis.with_for(fact).with_against(doubt))
        elif hypothesis.code == "retraction" and BATCH_INVARIANCE in hypothesis.conditions:
            left = (DIFFERENT_FUNCTION, RACE)
            judged.append(replace(hypothesis, conditions=left).with_for(fact))
        else:
            judged.append(hypothesis)
    return judged


_OF_BATCH = ("row_count", "place_in_batch")
"""Hypotheses by which other requests in the forward decide."""

_OF_ROWS = ("row_count", "quantised")
"""Hypotheses by which the number of rows decides."""

# (experiment, outcome): codes that it speaks for, codes that it speaks against.
_SPEAKS: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("repeats", SAME): ((), ("race",)),
    ("alone", SAME): ((), _OF_BATCH),
    ("alone", VANISHED): (_OF_BATCH, ("window_slip", "decode_step")),
    ("alone", DIFFERS): (("row_count",), ("place_in_batch",)),
    ("wide_restore", VANISHED): (("few_row_extend",), ("wrong_restore",)),
    # Not against few_row_extend: another page restores another number of tokens, and extends the other rows.
    ("page_size", MOVED): (("wrong_restore",), ()),
    ("page_size", VANISHED): (("wrong_restore", "few_row_extend"), ()),
    ("page_size", SAME): (("tile_edge",), ()),
    ("overlap", VANISHED): (("race",), ()),
    ("overlap", SAME): ((), ("race",)),
    ("chunk_size", MOVED): (("chunk_boundary",), ()),
    ("chunk_size", VANISHED): (("chunk_boundary",), ()),
    ("chunk_size", SAME): ((), ("chunk_boundary",)),
    ("kv_dtype", VANISHED): (("quantised", "tile_edge"), ("window_slip",)),
    ("kv_dtype", SAME): ((), ("quantised",)),
}


def _after_outcome(
    hypotheses: list[Hypothesis],
    outcome: Mapping[str, Any],
    scene: Scene,
    findings: Sequence[Mapping[str, Any]],
) -> list[Hypothesis]:
    name, result = str(outcome.get("name")), str(outcome.get("outcome"))
    fact = Fact(f"experiment_{name}", str(outcome.get("text") or ""), {"outcome": result})
    match name, result:
        case _, "no_effect":
            return hypotheses
        case "repeats", "differs":
            return _after_other_bits(hypotheses, fact, "confirmed")
        case "equal_m", "same_bits" | "differs":
            return _after_equal_rows(hypotheses, result, fact, scene, findings)
        case "wide_restore", "differs":
            return _after_wide_restore(hypotheses, fact, scene)
        case "overlap", "vanished" if (outcome.get("values") or {}).get("composed_equally") is False:
            text = "the scheduler put the batches together otherwise, too: their row counts changed with it"
            doubt = Fact("other_batches", text)
            return [h.with_for(fact).with_against(doubt) if h.code == "race" else h for h in hypotheses]
        case "alone", "same_bits" if any(map(only_rows_are_left, findings)):
            # Not by the row count, as its replay says, and not by other rows: there were none.
            hypotheses = _settled(hypotheses, DIFFERENT_FUNCTION, "confirmed", fact)
            return [_lowered(h, fact) if h.code in _OF_BATCH else h for h in hypotheses]
        case "pad", "predicted" | "refuted":
            # Of a residue of lengths; one of the cached prefix speaks of what is restored.
            cached = (outcome.get("values") or {}).get("quantity") == "cached_tokens"
            named = ("wrong_restore",) if cached else ("length_residue",)
            return [_after_padding(h, result, fact) if h.code in named else h for h in hypotheses]
    speaks_for, against = _SPEAKS.get((name, result), ((), ()))
    judged = []
    for hypothesis in hypotheses:
        if hypothesis.code in speaks_for:
            judged.append(_raised(hypothesis, fact))
        elif hypothesis.code in against:
            judged.append(_lowered(hypothesis, fact))
        else:
            judged.append(hypothesis)
    return judged


def _raised(hypothesis: Hypothesis, fact: Fact) -> Hypothesis:
    grade = "probable" if hypothesis.grade == "unknown" else hypothesis.grade
    return replace(hypothesis.with_for(fact), grade=grade, weight=hypothesis.weight + 25)


def _lowered(hypothesis: Hypothesis, fact: Fact) -> Hypothesis:
    grade = "unknown" if hypothesis.grade == "probable" else hypothesis.grade
    return replace(hypothesis.with_against(fact), grade=grade, weight=hypothesis.weight - 40)


def _after_padding(hypothesis: Hypothesis, result: str, fact: Fact) -> Hypothesis:
    """A residue that decides says where, not why: what spoke against its explanation still does."""
    if result != PREDICTED:
        return _lowered(hypothesis, fact)
    return hypothesis.with_for(fact) if hypothesis.speaks_against else _raised(hypothesis, fact)


def _after_equal_rows(
    hypotheses: list[Hypothesis],
    result: str,
    fact: Fact,
    scene: Scene,
    findings: Sequence[Mapping[str, Any]],
) -> list[Hypothesis]:
    """Decode against a one-token extend with as many rows, on the same cached prefix."""
    if hits_only(scene):
        # Decode was clean; what the extend does wrong, restored state or few rows, is just what is asked.
        doubt = Fact("equal_m_blind", "only hits diverge, and this arm is made of hits: it decides nothing")
        return [
            h.with_against(doubt) if h.code in ("wrong_restore", "few_row_extend") else h for h in hypotheses
        ]
    if result == DIFFERS:
        # Both logprobs of this arm are of generated tokens: how scores are defined has no part in it.
        hypotheses = [_lowered(h, fact) if h.code == "definition" else h for h in hypotheses]
        if any(map(is_rounding, findings)):
            # Located and recomputed: two kernels that round otherwise do so with equal row counts, too.
            return [h.with_for(fact) if h.code == "tile_edge" else h for h in hypotheses]
        doubt = Fact(
            "other_kernel",
            "kernels that split the keys otherwise, or that pad decode, round otherwise also with equal row "
            "counts: locate it, then attention or a gated delta rule is recomputed from its inputs",
        )
        # How large a difference is proves nothing; rounding that flips experts may be of any size.
        if scene.beyond_rounding and not scene.traits.experts:
            hypotheses = _settled(hypotheses, DIFFERENT_FUNCTION, "probable", fact)
            hypotheses = [_lowered(h, fact) if h.code == "tile_edge" else h for h in hypotheses]
        hypotheses = [_lowered(h, fact) if h.code in _OF_ROWS else h for h in hypotheses]
        return [
            h.with_for(fact).with_against(doubt) if h.conditions == (DIFFERENT_FUNCTION,) else h
            for h in hypotheses
        ]
    if findings and all(map(is_beside_the_state, findings)):
        # The origin reads no earlier row: there is no mask or window in it that could be wrong.
        return _settled(hypotheses, BATCH_INVARIANCE, "confirmed", fact)
    if any(h.code == "retraction" for h in hypotheses):
        other = Fact("nothing_retracted", "no request of this arm was retracted: it says nothing of those")
        return [h.with_against(other) if h.code == "retraction" else h for h in hypotheses]
    if any(h.code == "definition" for h in hypotheses):
        # Both logprobs of this arm are of generated tokens; another definition of scores stays possible.
        named = ("definition", "row_count")
        return [h.with_for(fact) if h.code in named else h for h in hypotheses]
    doubt = Fact("wide_mask", "a mask that is wrong only in extends of many rows would look alike")
    settled = _settled(hypotheses, BATCH_INVARIANCE, "probable", fact)
    settled = [_lowered(h, fact) if h.code in ("window_slip", "decode_step") else h for h in settled]
    return [h.with_against(doubt) if h.code in ("row_count", "tile_edge") else h for h in settled]


def _after_wide_restore(hypotheses: list[Hypothesis], fact: Fact, scene: Scene) -> list[Hypothesis]:
    """A restored prefix under a wide extend still diverges."""
    grade = "probable"
    if cold_in_chunks(scene):
        # Cold requests extended a prefix of their own in chunks and are clean: only the restore is left.
        grade = "confirmed"
    settled = _settled(hypotheses, DIFFERENT_FUNCTION, grade, fact, "wrong_restore")
    if grade == "probable":
        doubt = Fact(
            "no_cold_chunks",
            "no cold request was computed in chunks, so a kernel that rounds otherwise behind any prefix is "
            "not excluded: run with --chunked-prefill-size 128",
        )
        settled = [
            replace(h.with_against(doubt), next="cold_chunks") if h.code == "wrong_restore" else h
            for h in settled
        ]
    return [_lowered(h, fact) if h.code == "few_row_extend" else h for h in settled]
