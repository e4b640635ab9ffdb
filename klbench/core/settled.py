"""What findings and experiments settle: they may confirm what a run alone only suspects.

A finding of `klbench locate` confirms a condition only if it is confirmed itself and leaves one kind; an
experiment confirms one where its outcome has one meaning. What contradicts a hypothesis stands against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from klbench.core.experiments import DIFFERS, MOVED, SAME, VANISHED
from klbench.core.hypotheses import BATCH_INVARIANCE, DIFFERENT_FUNCTION, RACE, Hypothesis
from klbench.core.model_traits import OPERATOR_CLASSES, operator_class
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
    for finding in findings:
        if not finding.get("latent"):
            judged = _after_finding(judged, finding)
    for outcome in outcomes:
        judged = _after_outcome(judged, outcome, scene)
    return judged


def condition_of_finding(finding: Mapping[str, Any]) -> tuple[str | None, str, bool]:
    """(condition, why, certain) of an origin; None where its evidence leaves both. `certain`: the kind of the
    origin admits no other condition."""
    kinds = [str(kind) for kind in finding.get("kinds") or [finding.get("kind")]]
    module = str(finding.get("module") or "")
    if len(kinds) > 1 and not set(kinds) <= {"state_write", "state_restore"}:
        return None, f"the origin at {module} may be of the kinds {', '.join(kinds)}", False
    match kinds[0]:
        case "state_restore":
            return DIFFERENT_FUNCTION, f"the state that {module} reads is not what was written", True
        case "state_write":
            return (
                DIFFERENT_FUNCTION,
                f"the state of {module} was written differently from equal inputs",
                True,
            )
        case "operator" | "gap" | "head":
            return _of_arithmetic(finding, kinds[0], module)
    return None, f"the origin at {module} was not observed", False


def _of_arithmetic(finding: Mapping[str, Any], kind: str, module: str) -> tuple[str | None, str, bool]:
    facts = [fact for fact in finding.get("evidence") or () if isinstance(fact, Mapping)]
    values = next((fact.get("values") for fact in facts if fact.get("code") == "ulps"), None)
    difference = values if isinstance(values, Mapping) else None
    if finding.get("replay_M") is not None:
        return (
            BATCH_INVARIANCE,
            f"{module} alone gives other bits from M = {finding['replay_M']} rows on",
            True,
        )
    if kind == "gap":
        return BATCH_INVARIANCE, f"what lies between {module} gives other bits for equal inputs", False
    known = operator_class(module)
    if kind == "operator" and known is OPERATOR_CLASSES[0]:
        return (
            BATCH_INVARIANCE,
            f"{module} works on each token alone: with equal inputs only the rows beside it can matter",
            True,
        )
    # How a difference looks is a reason to suspect, no proof: another tile may differ by much, too.
    if difference is not None and difference.get("structured") and difference.get("pattern") != "scattered":
        ulps = difference.get("max_ulps")
        why = f"with equal inputs and state {module} differs in whole blocks, by {ulps} ulps"
        return DIFFERENT_FUNCTION, why, False
    if difference is not None and difference.get("structured") is False:
        why = f"with equal inputs and state {module} differs by {difference.get('max_ulps')} ulps at most"
        return BATCH_INVARIANCE, why, False
    return None, f"{module} differs with equal inputs: its arithmetic, or a mask or window inside it", False


def _after_finding(hypotheses: list[Hypothesis], finding: Mapping[str, Any]) -> list[Hypothesis]:
    condition, why, certain = condition_of_finding(finding)
    grade = str(finding.get("grade") or "unknown")
    if grade == "confirmed" and not certain:
        grade = "probable"
    fact = Fact(
        "finding",
        f"located ({finding.get('grade')}): {why}",
        {"module": finding.get("module"), "kinds": list(finding.get("kinds") or ()), "grade": grade},
    )
    if condition is None:
        return [h.with_for(fact) if BATCH_INVARIANCE in h.conditions else h for h in hypotheses]
    restored = "state_restore" in (finding.get("kinds") or [finding.get("kind")])
    if grade not in ("confirmed", "probable"):
        return [h.with_for(fact) if condition in h.conditions else h for h in hypotheses]
    preferred = "wrong_restore" if restored else None
    return _settled(hypotheses, condition, grade, fact, preferred)


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


# (experiment, outcome): codes that it speaks for, codes that it speaks against.
_SPEAKS: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("repeats", SAME): ((), ("race",)),
    ("alone", SAME): ((), ("row_count", "place_in_batch")),
    ("alone", VANISHED): (("row_count", "place_in_batch"), ("window_slip", "decode_step")),
    ("alone", DIFFERS): (("row_count",), ("place_in_batch",)),
    ("wide_restore", VANISHED): (("few_row_extend",), ("wrong_restore",)),
    ("page_size", MOVED): (("wrong_restore",), ("few_row_extend",)),
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
    hypotheses: list[Hypothesis], outcome: Mapping[str, Any], scene: Scene
) -> list[Hypothesis]:
    name, result = str(outcome.get("name")), str(outcome.get("outcome"))
    fact = Fact(f"experiment_{name}", str(outcome.get("text") or ""), {"outcome": result})
    match name, result:
        case _, "no_effect":
            return hypotheses
        case "repeats", "differs":
            return _settled(hypotheses, RACE, "confirmed", fact)
        case "equal_m", "same_bits" | "differs":
            return _after_equal_rows(hypotheses, result, fact, scene)
        case "wide_restore", "differs":
            return _after_wide_restore(hypotheses, fact, scene)
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


def _after_equal_rows(
    hypotheses: list[Hypothesis], result: str, fact: Fact, scene: Scene
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
        settled = _settled(hypotheses, DIFFERENT_FUNCTION, "confirmed", fact)
        arithmetic = ("row_count", "tile_edge", "quantised")
        return [_lowered(h, fact) if h.code in arithmetic else h for h in settled]
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
