"""Which condition an origin speaks of, from its kind and its evidence.

Findings are those of klbench.locate/1, as mappings: they may come from a session of another version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from klbench.core.hypotheses import BATCH_INVARIANCE, DIFFERENT_FUNCTION
from klbench.core.model_traits import OPERATOR_CLASSES, operator_class
from klbench.core.recomputed import ATTENTION, DELTA_RULE, FUNCTIONS, RECOMPUTED

_DIVIDED = {
    ATTENTION: "how decode and an extend divide the keys",
    DELTA_RULE: "that decode goes from row to row and an extend scans them in chunks",
}
"""What rounds otherwise in the two arms, also with one row in both."""


def condition_of_finding(finding: Mapping[str, Any]) -> tuple[str | None, str, bool]:
    """(condition, why, certain) of an origin; None where its evidence leaves both. `certain`: the kind of the
    origin admits no other condition."""
    kinds = [str(kind) for kind in finding.get("kinds") or [finding.get("kind")]]
    module = str(finding.get("module") or "")
    code, said = _recomputed(finding)
    if said in FUNCTIONS and "not_observed" not in kinds:
        # Of whichever of its kinds it is.
        return DIFFERENT_FUNCTION, f"{module}: {_text(finding, code)}", True
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
    code, said = _recomputed(finding)
    if said == "rounding":
        why = f"{module}: {_text(finding, code)}"
        if (_values(finding, "equal_m") or {}).get("outcome") == "differs":
            why += (
                "; with one row in both forwards they round otherwise, too: what decides is "
                f"{_DIVIDED[code]}, not how many rows there are"
            )
        return BATCH_INVARIANCE, why, True
    difference = _values(finding, "ulps")
    if finding.get("replay_M") is not None:
        return (
            BATCH_INVARIANCE,
            f"{module} alone gives other bits from M = {finding['replay_M']} rows on",
            True,
        )
    counts = _values(finding, "row_counts") or {}
    if counts.get("outcome") == "changes":
        rows = counts.get("changed_M")
        from_rows = f" from M = {min(rows)} rows on" if isinstance(rows, list) and rows else ""
        why = f"in forwards that differ in their row count alone {module} gives other bits{from_rows}"
        return BATCH_INVARIANCE, why, True
    if rows_do_not_matter(finding):
        why = f"{module} alone gives the same bits with the row counts of both arms, and not in the arms"
        if is_one_row_otherwise(finding):
            why += "; with one row in both forwards decode and an extend differ, too"
            return DIFFERENT_FUNCTION, why, True
        if module == "logprob":
            return DIFFERENT_FUNCTION, f"{why}: two functions compute it", True
        return None, f"{why}: padding, or what else it reads that is not seen, decides", False
    if kind == "gap":
        return BATCH_INVARIANCE, f"what lies between {module} gives other bits for equal inputs", False
    if is_one_row_otherwise(finding) and does_not_repeat(finding) is None:
        why = f"with one row in both forwards and equal inputs {module} differs between decode and an extend"
        return DIFFERENT_FUNCTION, why, True
    if kind == "operator" and operator_class(module) is OPERATOR_CLASSES[0]:
        # Called again it would show; where it cannot be, what else it is told may decide, too.
        why = f"{module} works on each token alone: with equal inputs the rows beside it matter"
        certain = _values(finding, "not_replayed") is None and does_not_repeat(finding) is None
        return BATCH_INVARIANCE, why, certain
    if (_values(finding, "equal_m") or {}).get("outcome") == "same_bits":
        return (
            BATCH_INVARIANCE,
            f"{module} gives the same bits as decode and as extend with equal rows",
            False,
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


def is_rounding(finding: Mapping[str, Any]) -> bool:
    """Whether it is a confirmed operator that, recomputed, rounds otherwise in its two arms."""
    return finding.get("grade") == "confirmed" and _recomputed(finding)[1] == "rounding"


def _recomputed(finding: Mapping[str, Any]) -> tuple[str, str | None]:
    """The code of the evidence of a recomputation and its verdict, None where there is none."""
    for code in RECOMPUTED:
        if (values := _values(finding, code)) is not None:
            return code, str(values.get("verdict"))
    return RECOMPUTED[0], None


def is_beside_the_state(finding: Mapping[str, Any]) -> bool:
    """Whether it is a confirmed origin of one kind that reads no earlier row: token-wise, or between such."""
    kinds = finding.get("kinds") or [finding.get("kind")]
    ends = str(finding.get("module") or "").split(" -> ")
    token_wise = all(operator_class(end) is OPERATOR_CLASSES[0] for end in ends)
    return finding.get("grade") == "confirmed" and list(kinds) in (["gap"], ["operator"]) and token_wise


def rows_do_not_matter(finding: Mapping[str, Any]) -> bool:
    """Whether its operator, called again alone, gave the same bits with the row counts of both arms."""
    replayed = _values(finding, "replay_invariant")
    return replayed is not None and does_not_repeat(finding) is None


def is_one_row_otherwise(finding: Mapping[str, Any]) -> bool:
    """Whether an operator without state gave other bits as decode than as a one-token extend, each with that
    row alone and equal inputs."""
    found = _values(finding, "equal_m") or {}
    return found.get("outcome") == "differs" and found.get("stateful") is False


def only_rows_are_left(finding: Mapping[str, Any]) -> bool:
    """Whether it would be confirmed, but that its operator, called again alone, shows nothing: other rows of
    its forward, or what it is told beside its inputs, decide."""
    missing = (_values(finding, "not_confirmed") or {}).get("missing")
    kinds = list(finding.get("kinds") or [finding.get("kind")])
    return kinds == ["operator"] and missing == ["replay"] and rows_do_not_matter(finding)


def is_wrong_copy(finding: Mapping[str, Any]) -> bool:
    """Whether the capture saw, together with the divergence, state that is not what it was copied from: K/V
    rows that differ though what they were written from does not, or state that was read and never written.

    No arithmetic lies between, so no batch makes it: that it was another batch than the measured one, or that
    other bits came this time, is no doubt about its condition. The state of a recurrence is computed when it
    is written, and only its restore is a copy.
    """
    kinds = list(finding.get("kinds") or [finding.get("kind")])
    if kinds not in (["state_write"], ["state_restore"]) or _values(finding, "symptom_gone") is not None:
        return False
    values = _values(finding, kinds[0])
    if values is None:
        return False
    return kinds == ["state_restore"] or set(values.get("arguments") or ("?",)) <= {"k", "v"}


def does_not_repeat(finding: Mapping[str, Any]) -> str | None:
    """How a repeat in equal batches gave something else, or None."""
    if _values(finding, "other_batch") is not None:
        return None
    if _values(finding, "not_repeated") is not None:
        return "the run was repeated in equal batches while it was captured, and generated other tokens"
    if _values(finding, "capture_changed_logprobs") is not None:
        return "the run was repeated in equal batches while it was captured, and logprobs changed their bits"
    missing = (_values(finding, "not_confirmed") or {}).get("missing")
    if isinstance(missing, list) and "repeat_differs" in missing:
        return "it was captured twice in equal batches, and the origins are not the same"
    return None


def _values(finding: Mapping[str, Any], code: str) -> Mapping[str, Any] | None:
    """The values of its evidence with this code, None where there is none."""
    for fact in finding.get("evidence") or ():
        if isinstance(fact, Mapping) and fact.get("code") == code:
            values = fact.get("values")
            return values if isinstance(values, Mapping) else {}
    return None


def _text(finding: Mapping[str, Any], code: str) -> str:
    for fact in finding.get("evidence") or ():
        if isinstance(fact, Mapping) and fact.get("code") == code:
            return str(fact.get("text") or "").rstrip(".")
    return ""
