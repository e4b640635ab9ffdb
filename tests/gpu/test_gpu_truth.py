"""The checks of the GPU list refuse what they must, and take nothing that was left open for right."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from klbench.core.columns import HELPERS
from tests.gpu import clean, truth
from tests.gpu import truth_of_origins as origins
from tests.gpu.judgement import Documents, Judgement
from tests.gpu.models import LAYERS

HELPER = {"status": "clean", "divergent_tokens": 0, "tokens": 4096, "all_s": [1.0, 1.2, 1.1]}
FOUND = ("right", "", "")


def judged(judgement: Judgement) -> tuple[str, str, str]:
    return judgement.answer, "; ".join(judgement.wrong), "; ".join(judgement.undecided)


def helpers(**changed: Any) -> dict[str, Any]:
    return {name: {**HELPER, **changed.get(name, {})} for name in HELPERS}


def capture(helper: str = "match", backend: str = "digest", **more: Any) -> dict[str, Any]:
    made = {"helper": helper, "backend": backend, "bytes": 7_500_000, "files": 3, "capture_s": 2.4}
    made |= {"changed_logprobs": 0, "compared_logprobs": 512, "findings": []}
    return made | {"alignment": {"proved": True}} | more


DUMPED = {"bytes": 13_953_000_000, "files": 17_306, "capture_s": 21.3}


def clean_document(**changed: Any) -> dict[str, Any]:
    document = {
        "finished": True,
        "helpers": helpers(),
        "captures": [*map(capture, HELPERS), capture(backend="dumper", **DUMPED)],
        "stock": [{name: {"elapsed_s": second} for name in HELPERS} for second in (1.0, 1.1, 3.0)],
        "errors": [],
    }
    return {"clean": document | changed}


NOT_COMPARED = {"prefill_cache_hit": {"status": "inconclusive", "reason": "2 of 32 requests hit"}}


@pytest.mark.parametrize(
    ("changed", "answer", "said"),
    [
        ({}, "right", ""),
        ({"helpers": helpers(match={"divergent_tokens": 3})}, "wrong", "match is clean, 3 differ"),
        ({"helpers": helpers(match={"status": "error"})}, "wrong", "match is error"),
        ({"captures": [capture(name, changed_logprobs=2) for name in HELPERS]}, "wrong", "match: 2 changed"),
        ({"captures": [capture(name, findings=[{}]) for name in HELPERS]}, "wrong", "0 changed, 1 findings"),
        ({"errors": [{"what": "the capture failed"}]}, "wrong", "an error: the capture failed"),
        ({"finished": False}, "undecided", "cut before its end"),
        ({"helpers": helpers(**NOT_COMPARED)}, "undecided", "prefill_cache_hit is inconclusive: 2 of 32"),
        ({"helpers": {"match": HELPER}}, "undecided", "decode_cache_hit is not_run"),
        ({"captures": [capture()]}, "undecided", "decode_cache_hit was not captured"),
        (
            {"captures": [capture(name, alignment={"proved": False}) for name in HELPERS]},
            "undecided",
            "capture of match: its rows were not paired",
        ),
    ],
)
def test_a_clean_server_compared_all_and_accused_nobody(
    changed: dict[str, Any], answer: str, said: str
) -> None:
    documents = clean_document(**changed)
    found = truth.is_clean(documents)
    assert found.answer == answer
    assert said in "; ".join(getattr(found, answer, ()))
    truth.says_clean(documents)


def test_costs_are_right_where_digests_are_cheaper_and_our_helpers_as_fast() -> None:
    documents = clean_document()
    assert judged(truth.cost_is_known(documents)) == FOUND
    said = truth.says_cost(documents)
    assert "digest 2.4 s, 7.5 MB in 3 files" in said
    assert "match 1.10 s, sglang's own 1.10 s (1.00x)" in said


@pytest.mark.parametrize(
    ("changed", "answer", "said"),
    [
        ({"captures": [capture()]}, "undecided", "not both back ends"),
        (
            {"captures": [capture(), capture(backend="dumper", **DUMPED | {"bytes": 20_000})]},
            "wrong",
            "1/200",
        ),
        (
            {"captures": [capture(), capture(backend="dumper", **DUMPED | {"capture_s": 2.0})]},
            "wrong",
            "digests take as long as the dumper",
        ),
        (
            {"captures": [capture(), capture(backend="dumper", **DUMPED | {"files": 3})]},
            "wrong",
            "as many files",
        ),
        ({"stock": []}, "undecided", "match was not timed beside sglang's own"),
        # A median of 1.3 beside one of 1.1, but one of theirs took 3 s.
        ({"helpers": helpers(match={"all_s": [1.2, 1.3, 1.4]})}, "undecided", "match takes 1.18x"),
        (
            {"helpers": helpers(match={"all_s": [3.2, 3.3, 3.4]})},
            "wrong",
            "match takes 3.00x of sglang's own",
        ),
        ({"helpers": helpers(match={"divergent_tokens": 3})}, "wrong", "match is clean, 3 differ"),
    ],
)
def test_costs_past_the_budget_or_not_known_are_not_right(
    changed: dict[str, Any], answer: str, said: str
) -> None:
    documents = clean_document(**changed)
    found = truth.cost_is_known(documents)
    assert found.answer == answer
    assert said in "; ".join(getattr(found, answer))
    truth.says_cost(documents)


ATTENTION = "model.layers.0.self_attn.attn"


def located(
    *,
    conditions: tuple[str, ...] = ("batch_invariance",),
    grade: str = "confirmed",
    match: str = "diverged",
    changed_logprobs: int = 0,
    evidence: tuple[str, ...] = ("tile", "constant_position", "window_crossed", "checkpoint_crossed"),
    server: dict[str, Any] | None = None,
    **finding: Any,
) -> dict[str, Any]:
    """The document of a locate; `grade` is the verdict's, what is not named goes to the finding."""
    values = {"tile": {"tile": 96}, "constant_position": {"row": 96}, "experts_differ": {"layer": 9}}
    facts = [{"code": code, "text": f"a {code}.", "values": values.get(code, {})} for code in evidence]
    origin = {
        "kind": "operator",
        "kinds": ["operator"],
        "module": ATTENTION,
        "layer": 0,
        "phase": "decode",
        "positions": {"first": 96, "count": 1},
        "grade": "confirmed",
        "latent": False,
        "evidence": facts,
    }
    document = {
        "findings": [origin | finding],
        "verdict": {"conditions": list(conditions), "grade": grade, "evidence": facts},
        "capture": {"changed_logprobs": changed_logprobs},
        "server": {"deterministic": False, "tp_size": 2} | (server or {}),
        "statuses": {"match": match},
    }
    return {"locate": document}


EXPERTS = {"evidence": ("experts_differ",)}
DELTA_RULE = {"module": "model.layers.0.linear_attn.attn"}
ORIGINS = [
    (origins.attention_of_layer_0, {}),
    (origins.attention_of_layer_0_flips_experts, EXPERTS),
    (origins.tile_edge, {}),
    (origins.attention_with_a_window, {}),
    (origins.delta_rule_of_layer_0, DELTA_RULE),
    (origins.rounding_without_the_flag, {}),
    (origins.rounding_without_the_flag_on_two, {}),
]


@pytest.mark.parametrize(("check", "base"), ORIGINS)
@pytest.mark.parametrize(
    ("changed", "answer"),
    [
        ({}, "right"),
        ({"kinds": ["operator", "state_restore", "state_write", "not_observed"]}, "undecided"),
        ({"kind": "state_restore", "kinds": ["state_restore"]}, "wrong"),
        ({"conditions": ("race",)}, "wrong"),
        ({"conditions": ("batch_invariance", "different_function")}, "undecided"),
        ({"grade": "unknown"}, "undecided"),
        ({"conditions": ()}, "undecided"),
        ({"changed_logprobs": 4}, "wrong"),
        ({"latent": True}, "undecided"),
    ],
)
def test_an_origin_is_right_only_where_nothing_is_open(
    check: Callable[[Documents], Judgement], base: dict[str, Any], changed: dict[str, Any], answer: str
) -> None:
    documents = located(**base | changed)
    # What an origin's own facts would say is said by the verdict, too.
    found = check(documents)
    assert found.answer == answer, found
    origins.says_located(documents)


@pytest.mark.parametrize(("check", "base"), ORIGINS[:5])
@pytest.mark.parametrize(
    ("changed", "answer"),
    [
        ({"module": "model.layers.1.self_attn.attn"}, "wrong"),
        ({"kind": "gap", "kinds": ["gap"]}, "wrong"),
        ({"phase": "extend"}, "wrong"),
        ({"match": "clean"}, "wrong"),
        ({"match": "not_run"}, "undecided"),
    ],
)
def test_an_operator_that_is_known_must_be_the_one(
    check: Callable[[Documents], Judgement], base: dict[str, Any], changed: dict[str, Any], answer: str
) -> None:
    assert check(located(**base | changed)).answer == answer


@pytest.mark.parametrize(
    ("check", "changed", "answer", "said"),
    [
        (origins.tile_edge, {"positions": {"first": 97, "count": 1}}, "wrong", "first row 97, not 96"),
        (origins.tile_edge, {"evidence": ("constant_position",)}, "wrong", "does not speak of a tile"),
        (origins.tile_edge, {"evidence": ("tile",)}, "wrong", "does not say that each begins at row 96"),
        (origins.attention_of_layer_0_flips_experts, {}, "wrong", "no expert is said to flip"),
        (origins.attention_with_a_window, {"evidence": ()}, "undecided", "no request passes the window"),
        (
            origins.delta_rule_of_layer_0,
            DELTA_RULE | {"evidence": ()},
            "undecided",
            "no checkpoint is passed",
        ),
        (origins.rounding_without_the_flag, {"server": {"deterministic": True}}, "wrong", "the flag is on"),
        (origins.rounding_without_the_flag, {"conditions": ("different_function",)}, "wrong", "condition"),
        (origins.rounding_without_the_flag_on_two, {"server": {"tp_size": 1}}, "wrong", "tp is 1"),
    ],
)
def test_what_a_row_is_about_must_be_said(
    check: Callable[[Documents], Judgement], changed: dict[str, Any], answer: str, said: str
) -> None:
    found = check(located(**changed))
    assert found.answer == answer
    assert said in "; ".join(getattr(found, answer))


def test_without_the_flag_any_operator_may_be_the_first_and_two_algorithms_may_be_either_condition() -> None:
    found = located(module="model.layers.3.mlp.down_proj", kind="gap", kinds=["gap"], phase="extend")
    assert judged(origins.rounding_without_the_flag(found)) == FOUND
    other = located(**DELTA_RULE, conditions=("different_function",))
    assert judged(origins.delta_rule_of_layer_0(other)) == FOUND


def test_nothing_captured_leaves_everything_open() -> None:
    documents = located()
    documents["locate"] |= {"capture": None, "findings": []}
    assert judged(origins.attention_of_layer_0(documents)) == (
        "undecided",
        "",
        "no origin is named; nothing was captured",
    )


def census(model: str = "dense", **changed: dict[str, Any]) -> dict[str, Any]:
    """A census in which everything keeps its bits; `changed` by the end of the module's name."""
    names = [*truth.EACH_LAYER, *truth.MLP[model]]
    modules = [*truth.ENDS, *(f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in names)]
    entries = []
    for module in modules:
        entry = {"module": module, "status": "invariant", "reason": None, "first_M": None, "tried_M": [1, 2]}
        entries.append(entry | changed.get(module.rpartition(".")[2], {}))
    entries.append({"module": ATTENTION, "status": "stateful", "reason": "it reads", "first_M": None})
    summary = {"invariant": len(modules), "not_invariant": 0}
    return {"census": {"operators": entries, "summary": summary, "rows": 863}}


@pytest.mark.parametrize(
    ("changed", "answer", "said"),
    [
        ({}, "right", ""),
        # What is true of a matrix product depends on shapes and libraries.
        ({"o_proj": {"status": "not_invariant", "first_M": 16}}, "right", ""),
        ({"o_proj": {"status": "not_invariant"}}, "wrong", "not said from how many rows on"),
        ({"act_fn": {"status": "not_invariant", "first_M": 16}}, "wrong", "works element by element"),
        ({"lm_head": {"status": "error", "reason": "it raised"}}, "wrong", "lm_head: it raised"),
        ({"qkv_proj": {"module": "model.layers.0.self_attn.q_norm"}}, "wrong", "the fused q/k norm"),
        ({"qkv_proj": {"status": "skipped", "reason": "no rows"}}, "undecided", "was not judged: no rows"),
        ({"norm": {"module": "other"}}, "undecided", "model.norm is not listed"),
        ({"norm": {"tried_M": [1]}}, "undecided", "was not called with one row and with more"),
    ],
)
def test_a_census_judges_every_operator_and_accuses_none_that_cannot_change(
    changed: dict[str, Any], answer: str, said: str
) -> None:
    found = truth.census_of_dense(census(**changed))
    assert found.answer == answer
    assert said in "; ".join(getattr(found, answer, ()))


def test_a_census_of_experts_has_other_operators() -> None:
    assert judged(truth.census_of_moe(census("moe"))) == FOUND
    assert truth.census_of_moe(census("dense")).answer == "undecided"


def experiments(**outcomes: str) -> dict[str, Any]:
    made = [{"name": name, "outcome": outcome, "text": "why"} for name, outcome in outcomes.items()]
    return {"experiment": {"experiments": made}}


@pytest.mark.parametrize(
    ("outcomes", "answer"),
    [
        ({"graphs": "same_bits", "overlap": "same_bits"}, "right"),
        ({"graphs": "same_bits", "overlap": "differs"}, "wrong"),
        ({"graphs": "same_bits", "overlap": "no_effect"}, "undecided"),
        ({"graphs": "same_bits"}, "undecided"),
    ],
)
def test_toggles_must_answer_and_change_nothing(outcomes: dict[str, str], answer: str) -> None:
    assert truth.toggles_change_nothing(experiments(**outcomes)).answer == answer


@pytest.mark.parametrize(
    ("changed", "answer"),
    [
        ({}, "right"),
        ({"graphs": False}, "wrong"),
        ({"first_row": 7}, "wrong"),
        ({"capture": {"changed_logprobs": 1}}, "wrong"),
        ({"findings": []}, "undecided"),
    ],
)
def test_the_probe_finds_the_state_behind_layer_0(changed: dict[str, Any], answer: str) -> None:
    finding = {"layer": 1, "positions": {"first": 303}, "latent": False}
    document = {"graphs": True, "capture": {"changed_logprobs": 0}, "findings": [finding], "first_row": 303}
    assert truth.probe_found({"probe": document | changed}).answer == answer


ANSWERS = ("right", "undecided", "wrong")
PLANTED = {
    "fault": "slot-reuse",
    "answer": "wrong",
    "marks": {
        "condition": "undecided",
        "helpers": "right",
        "operator": "wrong",
        "layer": "right",
        "position": "right",
        "kind": "right",
    },
    "why": "the condition may be batch_invariance and different_function; it is different_function; "
    "accused too: operator model.layers.0.self_attn.attn at 199, operator model.layers.2.self_attn.attn at 7",
    "located": [],
}


def selftest(*entries: dict[str, Any], planned: int | None = None) -> dict[str, Any]:
    cases = [dict(entry) for entry in entries]
    return {"selftest": {"cases": cases, "clean": [], "planned": planned or len(cases)}}


def test_beside_the_window_kernel_attention_may_be_named_too_and_nothing_else() -> None:
    right = {"fault": "restore-key", "answer": "right", "marks": {}, "why": "", "located": []}
    documents = selftest(right, PLANTED)
    assert judged(truth.all_right_beside_the_window_kernel(documents)) == FOUND
    assert judged(truth.all_right(documents)) == ("wrong", "slot-reuse wrong", "")
    for change in (
        {"why": PLANTED["why"].replace("layers.2.self_attn.attn", "layers.2.mlp.down_proj")},
        {"why": PLANTED["why"].replace("operator model.layers.2", "state_restore model.layers.2")},
        {"why": "match is not clean after the fault was disarmed; "},
        {"marks": PLANTED["marks"] | {"position": "wrong"}},
        {"marks": PLANTED["marks"] | {"condition": "wrong"}},
        {"answer": "did_not_fire"},
        {"answer": "error"},
    ):
        case = copy.deepcopy(PLANTED) | change
        found = truth.all_right_beside_the_window_kernel(selftest(case))
        assert found.wrong + found.undecided == (f"slot-reuse {case['answer']}",)


def test_a_fault_that_cannot_fire_and_did_not_is_as_it_must_be() -> None:
    silent = {"fault": "router-rows", "answer": "did_not_fire"}
    assert judged(truth.all_right(selftest(silent | {"cannot_fire": True}))) == FOUND
    fired = truth.all_right(selftest(silent | {"cannot_fire": False}))
    assert judged(fired) == ("undecided", "", "router-rows did_not_fire")


def test_a_fault_that_is_left_open_is_undecided_beside_right_ones_and_wrong_beside_wrong_ones() -> None:
    right, left_open, false = ({"fault": f"f-{answer}", "answer": answer} for answer in ANSWERS)
    assert truth.all_right(selftest(right, left_open)).answer == "undecided"
    assert truth.all_right(selftest(right, left_open, false)).answer == "wrong"


def test_a_selftest_that_was_cut_or_accuses_a_clean_server_is_not_right() -> None:
    right = {"fault": "restore-key", "answer": "right"}
    assert judged(truth.all_right(selftest(right, planned=3))) == ("undecided", "", "2 were not judged")
    documents = selftest(right)
    documents["selftest"]["clean"].append({"fault": "none", "answer": "wrong"})
    documents["selftest"]["planned"] = 2
    assert judged(truth.all_right(documents)) == ("wrong", "none wrong", "")


def test_a_run_is_clean_only_with_no_divergence_at_all() -> None:
    document = {"helpers": helpers(), "verdict": {"status": "none"}}
    assert judged(truth.run_is_clean({"run": document})) == FOUND
    document["helpers"]["match"] |= {"status": "not_run", "reason": "0 hits"}
    document["verdict"]["status"] = "undecided"
    assert judged(truth.run_is_clean({"run": document})) == (
        "undecided",
        "",
        "match is not_run: 0 hits; the verdict is undecided",
    )
    document["verdict"]["status"] = "found"
    assert truth.run_is_clean({"run": document}).answer == "wrong"


def test_a_check_of_a_clean_server_is_clean_only_where_all_three_helpers_were_compared() -> None:
    check = object.__new__(clean.Check)
    check.document = clean_document()["clean"]
    assert check.clean
    check.document["helpers"]["prefill_cache_hit"]["status"] = "inconclusive"
    assert not check.clean
