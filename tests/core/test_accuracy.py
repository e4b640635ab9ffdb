"""Answers are marked by the truth: nothing that was not said counts as right, nothing planted as accused."""

from typing import Any

import pytest

from klbench.core.accuracy import MARKS, Answer, First, Judged, Origin, Truth, judge

ATTENTION = "model.layers.1.self_attn.attn"
ORIGIN = Origin("restore-key", ATTENTION, 1, ("state_restore",), First(180))
TRUTH = Truth(
    frozenset({"different_function"}), frozenset({"prefill_cache_hit", "decode_cache_hit"}), (ORIGIN,)
)
STATUSES = {"match": "clean", "prefill_cache_hit": "diverged", "decode_cache_hit": "diverged"}
VERDICT = {"status": "found", "conditions": ["different_function"], "grade": "confirmed", "next": []}


def finding(**changed: Any) -> dict[str, Any]:
    found = {
        "kind": "state_restore",
        "module": ATTENTION,
        "layer": 1,
        "positions": {"first": 180, "count": 4},
        "latent": False,
        **changed,
    }
    return {"kinds": [found["kind"]], **found}


def judged(truth: Truth = TRUTH, **changed: Any) -> Judged:
    said = {"statuses": STATUSES, "verdict": VERDICT, "findings": [finding()], **changed}
    return judge(truth, Answer(**said))


def test_all_that_is_true_is_right() -> None:
    case = judged()
    assert (case.answer, case.why, case.grade) == ("right", "", "confirmed")
    assert set(case.marks.values()) == {"right"}
    assert tuple(case.marks) == MARKS


@pytest.mark.parametrize(
    ("mark", "changed"),
    [
        ("helpers", {"statuses": STATUSES | {"match": "diverged"}}),
        ("helpers", {"statuses": STATUSES | {"decode_cache_hit": "clean"}}),
        ("helpers", {"statuses": STATUSES | {"decode_cache_hit": "error"}}),
        ("condition", {"verdict": VERDICT | {"conditions": ["batch_invariance"]}}),
        ("condition", {"verdict": VERDICT | {"conditions": []}}),
        ("condition", {"verdict": {"status": "none", "conditions": [], "grade": "probable"}}),
        ("operator", {"findings": [finding(module="model.layers.2.self_attn.attn", layer=2)]}),
        ("operator", {"findings": [finding(), finding(module="lm_head", layer=None)]}),
        ("operator", {"findings": []}),
        ("layer", {"findings": [finding(layer=2)]}),
        ("position", {"findings": [finding(positions={"first": 181, "count": 1})]}),
        ("kind", {"findings": [finding(kind="operator")]}),
        ("kind", {"findings": [finding(kinds=["operator", "gap"])]}),
    ],
)
def test_what_is_not_true_is_wrong(mark: str, changed: dict[str, Any]) -> None:
    case = judged(**changed)
    assert (case.answer, case.marks[mark]) == ("wrong", "wrong")
    assert case.why


@pytest.mark.parametrize(
    ("mark", "changed"),
    [
        ("condition", {"conditions": ["batch_invariance", "different_function"]}),
        ("condition", {"grade": "unknown"}),
    ],
)
def test_a_condition_that_is_left_open_is_undecided_only_with_an_experiment(
    mark: str, changed: dict[str, Any]
) -> None:
    step = {"code": "wide_restore", "text": "", "values": {}}
    case = judged(verdict=VERDICT | changed | {"next": [{"code": "locate"}, step]})
    assert (case.answer, case.marks[mark], case.deciding) == ("undecided", "undecided", ("wide_restore",))
    case = judged(verdict=VERDICT | changed | {"next": [{"code": "locate"}]})
    assert case.answer == "wrong"
    assert "no experiment" in case.why


def test_several_kinds_are_undecided_where_the_true_one_is_among_them() -> None:
    verdict = VERDICT | {"next": [{"code": "equal_m"}]}
    case = judged(verdict=verdict, findings=[finding(kinds=["state_write", "state_restore"])])
    assert (case.answer, case.marks["kind"], case.marks["operator"]) == ("undecided", "undecided", "right")


def test_a_refused_capture_leaves_the_origin_undecided_and_the_rest_judged() -> None:
    verdict = VERDICT | {"next": [{"code": "repeats"}]}
    case = judged(verdict=verdict, findings=[], refusal="the server no longer repeats its tokens")
    assert (case.answer, case.marks["condition"], case.marks["operator"]) == (
        "undecided",
        "right",
        "undecided",
    )


def test_latent_findings_accuse_nobody() -> None:
    assert judged(findings=[finding(), finding(module="lm_head", latent=True)]).answer == "right"


def test_helpers_that_cannot_run_are_not_asked_for() -> None:
    assert judged(statuses=STATUSES | {"prefill_cache_hit": "not_run"}).answer == "right"


def test_a_fault_by_chance_must_reach_one_of_its_helpers_and_no_other() -> None:
    truth = Truth(TRUTH.conditions, TRUTH.dirty, TRUTH.origins, by_chance=True)
    assert judged(truth, statuses=STATUSES | {"decode_cache_hit": "clean"}).marks["helpers"] == "right"
    assert judged(truth, statuses=STATUSES | {"match": "diverged"}).marks["helpers"] == "wrong"
    assert judged(truth, statuses=dict.fromkeys(STATUSES, "clean")).marks["helpers"] == "wrong"


def test_where_chance_may_reach_every_helper_that_ran_there_is_no_rule_for_them() -> None:
    truth = Truth(TRUTH.conditions, frozenset(STATUSES), TRUTH.origins, by_chance=True)
    assert judged(truth).marks["helpers"] == "no_rule"
    assert judged(truth, statuses=dict.fromkeys(STATUSES, "clean")).marks["helpers"] == "wrong"
    assert judged(truth, statuses=STATUSES | {"match": "error"}).marks["helpers"] == "wrong"


def test_what_the_truth_has_no_rule_for_is_not_right_and_not_wrong() -> None:
    head = Origin("race", "logprob", None, ("head",))
    truth = Truth(TRUTH.conditions, TRUTH.dirty, (head,))
    found = finding(kind="head", module="logprob", layer=None)
    case = judged(truth, findings=[found])
    assert (case.answer, case.marks["layer"], case.marks["position"]) == ("right", "no_rule", "no_rule")
    assert {case.marks[name] for name in ("condition", "helpers", "operator", "kind")} == {"right"}
    assert judged(truth, findings=[found | {"layer": 2}]).marks["layer"] == "wrong"
    missed = judged(truth, findings=[finding()])
    assert (missed.answer, missed.marks["operator"]) == ("wrong", "wrong")
    assert (missed.marks["layer"], missed.marks["position"]) == ("no_rule", "no_rule")


def test_of_two_faults_the_one_with_a_rule_is_counted() -> None:
    unruled = Origin("race", "model.layers.3.self_attn.o_proj", 3, ("operator",))
    truth = Truth(TRUTH.conditions, TRUTH.dirty, (ORIGIN, unruled))
    second = finding(kind="operator", module=unruled.module, layer=3)
    assert judged(truth, findings=[finding(), second]).marks["position"] == "right"


def test_of_two_faults_both_must_be_named() -> None:
    other = Origin("o_proj-rows", "model.layers.3.self_attn.o_proj", 3, ("operator",), First(179))
    truth = Truth(frozenset({"different_function", "batch_invariance"}), TRUTH.dirty, (ORIGIN, other))
    verdict = VERDICT | {"conditions": ["batch_invariance", "different_function"]}
    second = finding(
        kind="operator", module="layers.3.self_attn.o_proj", layer=3, positions={"first": 179, "count": 1}
    )
    assert judged(truth, verdict=verdict, findings=[finding(), second]).answer == "right"
    assert judged(truth, verdict=verdict, findings=[finding()]).marks["operator"] == "wrong"


def test_a_fault_in_the_cone_of_another_must_be_listed_as_masked() -> None:
    hidden = "model.layers.2.post_attention_layernorm"
    truth = Truth(TRUTH.conditions, TRUTH.dirty, (ORIGIN,), masked=(hidden,))
    assert judged(truth, masked=[{"module": hidden}]).answer == "right"
    assert judged(truth, masked=[]).marks["operator"] == "wrong"


def test_paths_are_compared_without_the_name_of_the_whole_model() -> None:
    gap = Origin("residual-gap", "model.layers.1.o_proj -> model.layers.1.norm", 1, ("gap",), First(180))
    truth = Truth(TRUTH.conditions, TRUTH.dirty, (gap,))
    found = finding(kind="gap", module="layers.1.o_proj -> layers.1.norm")
    assert judged(truth, findings=[found]).answer == "right"


def test_requests_that_the_fault_spares_must_be_clean_and_the_others_not() -> None:
    truth = Truth(TRUTH.conditions, TRUTH.dirty, TRUTH.origins, requests=frozenset({1, 3}))
    assert judged(truth, divergent=frozenset({1, 3})).answer == "right"
    assert judged(truth, divergent=frozenset({0, 1, 3})).marks["helpers"] == "wrong"
    assert judged(truth, divergent=frozenset({1})).marks["helpers"] == "wrong"
