"""An origin speaks of a condition only as far as its evidence admits no other."""

from typing import Any

import pytest

from klbench.core.finding_condition import (
    condition_of_finding,
    does_not_repeat,
    is_beside_the_state,
    is_rounding,
    is_wrong_copy,
    only_rows_are_left,
    rows_do_not_matter,
)

ATTENTION = "model.layers.1.self_attn.attn"
ROTARY = "model.layers.1.self_attn.rotary_emb"
ONE = "batch_invariance"
O_PROJ = "model.layers.1.self_attn.o_proj"


def fact(code: str, **values: Any) -> dict[str, Any]:
    return {"code": code, "text": f"{code}.", "values": values}


def finding(kind: str, module: str, *evidence: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "kinds": [kind],
        "module": module,
        "grade": "confirmed",
        "evidence": list(evidence),
        **changed,
    }


RECURRENCE = "model.layers.0.linear_attn.attn"
STATE_KINDS = ["state_restore", "state_write", "operator"]


@pytest.mark.parametrize(
    ("verdict", "kinds", "condition"),
    [
        ("rounding", ["operator"], ONE),
        ("other_function", ["operator"], "different_function"),
        ("other_function", STATE_KINDS, "different_function"),
        # Another rank may have added what differs, or nothing was concluded: the kinds decide, as before.
        ("other_function", [*STATE_KINDS, "not_observed"], None),
        ("rounding", ["operator", "not_observed"], None),
        ("unknown", STATE_KINDS, None),
        ("unknown", ["operator"], None),
    ],
)
def test_a_recurrence_that_was_recomputed_decides_its_condition(
    verdict: str, kinds: list[str], condition: str | None
) -> None:
    said = fact("delta_rule_reference", verdict=verdict)
    found = finding(kinds[0], RECURRENCE, said, kinds=kinds)
    judged, why, certain = condition_of_finding(found)
    assert (judged, certain) == (condition, condition is not None)
    if condition is not None:
        assert why == f"{RECURRENCE}: delta_rule_reference"
    assert is_rounding(found) == (verdict == "rounding")


def test_a_recurrence_that_rounds_otherwise_with_one_row_does_so_for_its_order() -> None:
    said = [
        fact("delta_rule_reference", verdict="rounding"),
        fact("equal_m", outcome="differs", stateful=True),
    ]
    condition, why, certain = condition_of_finding(finding("operator", RECURRENCE, *said))
    assert (condition, certain) == (ONE, True)
    assert why.endswith(
        "decode goes from row to row and an extend scans them in chunks, not how many rows there are"
    )


def test_rounding_that_shows_with_one_row_too_is_told_from_the_number_of_rows() -> None:
    """Condition 1 stands beside "It is not the number of rows": the same sum, divided otherwise."""
    rounding = fact("attention_reference", verdict="rounding")
    condition, why, certain = condition_of_finding(
        finding("operator", ATTENTION, rounding, fact("equal_m", outcome="differs", stateful=True))
    )
    assert (condition, certain) == (ONE, True)
    assert why.startswith(f"{ATTENTION}: attention_reference; with one row in both forwards")
    assert why.endswith("how decode and an extend divide the keys, not how many rows there are")
    for more in ([], [fact("equal_m", outcome="same_bits", stateful=True)]):
        _, usual, _ = condition_of_finding(finding("operator", ATTENTION, rounding, *more))
        assert usual == f"{ATTENTION}: attention_reference"


@pytest.mark.parametrize(
    ("found", "condition", "certain"),
    [
        (finding("state_restore", ATTENTION), "different_function", True),
        (finding("state_write", ATTENTION), "different_function", True),
        (finding("operator", O_PROJ, replay_M=64), "batch_invariance", True),
        (finding("operator", O_PROJ, fact("replay_invariant")), None, False),
        (finding("head", "logprob", fact("replay_invariant")), "different_function", True),
        (finding("gap", f"{O_PROJ} -> model.norm"), "batch_invariance", False),
        (finding("operator", ATTENTION), None, False),
        (
            finding("operator", ATTENTION, fact("attention_reference", verdict="rounding")),
            "batch_invariance",
            True,
        ),
        *(
            (
                finding("operator", ATTENTION, fact("attention_reference", verdict=verdict)),
                "different_function",
                True,
            )
            for verdict in ("missing_key", "extra_key", "other_function")
        ),
        (finding("operator", ATTENTION, fact("attention_reference", verdict="unknown")), None, False),
        (finding("operator", ATTENTION, fact("equal_m", outcome="same_bits")), "batch_invariance", False),
        (finding("operator", ATTENTION, fact("equal_m", outcome="differs")), None, False),
        (finding("operator", O_PROJ, kinds=["operator", "gap"]), None, False),
        # Called again alone the row count does not matter, and with one row in both arms it differs.
        (
            finding(
                "operator",
                ROTARY,
                fact("replay_invariant"),
                fact("equal_m", outcome="differs", stateful=False),
            ),
            "different_function",
            True,
        ),
        (
            finding(
                "operator",
                ROTARY,
                fact("replay_invariant"),
                fact("equal_m", outcome="same_bits", stateful=False),
            ),
            None,
            False,
        ),
        # It works on each token alone, and cannot be called again alone: what else it is told may decide.
        (finding("operator", ROTARY, fact("not_replayed", status="stateful")), ONE, False),
        *(
            (
                finding(
                    "operator",
                    ROTARY,
                    fact("not_replayed", status="stateful"),
                    fact("equal_m", outcome=outcome, stateful=False),
                ),
                condition,
                certain,
            )
            for outcome, condition, certain in (
                ("differs", "different_function", True),
                ("same_bits", ONE, False),
            )
        ),
        # Forwards that differ in their number of rows alone.
        *(
            (finding(kind, module, fact("row_counts", outcome="changes", changed_M=[64])), ONE, True)
            for kind, module in (
                ("gap", f"{O_PROJ} -> model.norm"),
                ("operator", "model.layers.3.conv.conv1d"),
            )
        ),
        (finding("gap", f"{O_PROJ} -> model.norm", fact("row_counts", outcome="same_bits")), ONE, False),
        (finding("gap", f"{O_PROJ} -> model.norm", fact("row_counts", outcome="other_rows")), ONE, False),
        (finding("operator", ATTENTION, fact("row_counts", outcome="other_rows")), None, False),
        (finding("not_observed", ATTENTION), None, False),
    ],
)
def test_the_condition_of(found: dict[str, Any], condition: str | None, certain: bool) -> None:
    assert condition_of_finding(found)[::2] == (condition, certain)


def test_what_recomputing_says_outweighs_how_large_the_difference_looks() -> None:
    large = fact("ulps", structured=True, pattern="block", max_ulps=90)
    found = finding("operator", ATTENTION, large, fact("attention_reference", verdict="rounding"))
    assert condition_of_finding(found)[0] == "batch_invariance"
    assert is_rounding(found)
    assert not is_rounding(found | {"grade": "probable"})


def test_where_only_other_rows_are_left_to_decide() -> None:
    lacking = fact("not_confirmed", missing=["replay"])
    found = finding("operator", ROTARY, fact("replay_invariant"), lacking, grade="probable")
    assert only_rows_are_left(found)
    assert not only_rows_are_left(found | {"kinds": ["operator", "not_observed"]})
    more = fact("not_confirmed", missing=["replay", "other_batch"])
    assert not only_rows_are_left(finding("operator", ROTARY, fact("replay_invariant"), more))
    assert not only_rows_are_left(finding("operator", ROTARY, lacking))


def test_other_bits_in_equal_batches_do_not_repeat_and_speak_of_no_function() -> None:
    changed = fact("capture_changed_logprobs", count=4)
    raced = finding("operator", O_PROJ, changed, fact("replay_invariant"), grade="unknown")
    assert does_not_repeat(raced) is not None
    assert not rows_do_not_matter(raced)
    # In other batches other bits are no news.
    assert does_not_repeat(finding("operator", O_PROJ, changed, fact("other_batch"))) is None
    twice = finding("operator", O_PROJ, fact("not_confirmed", missing=["repeat_differs"]))
    assert does_not_repeat(twice) is not None
    assert does_not_repeat(finding("operator", O_PROJ)) is None


@pytest.mark.parametrize(
    ("module", "kind", "beside"),
    [
        (O_PROJ, "operator", True),
        (f"{O_PROJ} -> model.layers.1.post_attention_layernorm", "gap", True),
        (ATTENTION, "operator", False),
        (f"model.layers.1.qkv_proj -> {ATTENTION}", "gap", False),
        (O_PROJ, "state_write", False),
    ],
)
def test_what_reads_no_earlier_row(module: str, kind: str, beside: bool) -> None:
    assert is_beside_the_state(finding(kind, module)) is beside
    assert not is_beside_the_state(finding(kind, module, grade="probable"))


def test_evidence_of_another_version_is_read_with_care() -> None:
    odd = finding("operator", O_PROJ, fact("replay_invariant"))
    odd["evidence"] += ["a sentence", {"code": "ulps"}, {"code": "not_confirmed", "values": {"missing": 3}}]
    assert condition_of_finding(odd)[0] is None
    assert condition_of_finding({"kind": "operator"})[0] is None


WROTE_K, RESTORED = fact("state_write", arguments=["k"]), fact("state_restore", arguments=["temporal"])


@pytest.mark.parametrize(
    ("found", "copied"),
    [
        (finding("state_write", ATTENTION, WROTE_K), True),
        (finding("state_write", ATTENTION, fact("state_write", arguments=["k", "v"])), True),
        (finding("state_restore", RECURRENCE, RESTORED), True),
        (finding("state_write", ATTENTION, WROTE_K, fact("other_batch")), True),
        (finding("state_write", ATTENTION, WROTE_K, fact("symptom_gone")), False),
        # A recurrence computes the state that it writes.
        (finding("state_write", RECURRENCE, fact("state_write", arguments=["temporal"])), False),
        (finding("state_write", ATTENTION, fact("state_write", arguments=[])), False),
        (finding("state_write", ATTENTION), False),
        (finding("state_write", ATTENTION, WROTE_K, kinds=["state_write", "operator"]), False),
        (finding("state_write", ATTENTION, WROTE_K, kinds=["state_write", "not_observed"]), False),
        (finding("operator", ATTENTION, fact("state_equal")), False),
        (finding("gap", f"{ATTENTION} -> {O_PROJ}"), False),
    ],
)
def test_a_copy_is_state_alone_and_seen_on_both_sides(found: dict[str, Any], copied: bool) -> None:
    assert is_wrong_copy(found) == copied
