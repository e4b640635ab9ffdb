"""What a recomputation leaves of a finding whose state nobody saw: its kinds, its grade, and no more."""

from dataclasses import replace
from typing import Any

import pytest

from klbench.core.attention_reference import Judgement
from klbench.core.census import OperatorReplay
from klbench.core.confirmation import (
    Experiment,
    confirmed,
    may_be_confirmed,
    wants_equal_m,
    wants_replay,
    wants_row_counts,
    with_replay,
)
from klbench.core.finding_condition import condition_of_finding
from klbench.core.findings import Evidence, Finding, Kind
from klbench.core.recomputed import may_be_recomputed, verdict, with_recurrence

ALL: tuple[Kind, ...] = ("operator", "state_restore", "state_write", "not_observed")
UNSEEN = Evidence("history_not_observed", "Not all earlier positions were captured.", {})

STATEFUL = OperatorReplay(
    module="model.layers.0.linear_attn.attn",
    call=0,
    class_name="RadixLinearAttention",
    order=0,
    rank=0,
    status="stateful",
    reason="it reads the recurrent state",
    total=0,
    tried=(),
    judged=(),
    variants=(),
    damage=None,
)


def found(kinds: tuple[Kind, ...] = ALL, *evidence: Evidence, **changed: Any) -> Finding:
    finding = Finding(
        kinds=kinds,
        module="model.layers.0.linear_attn.attn",
        call=0,
        operator=4,
        layer=0,
        request=1,
        arm="generation",
        rank=0,
        phase="decode",
        first_position=300,
        count=9,
        grade="unknown",
        latent=False,
        evidence=evidence or (UNSEEN,),
    )
    return replace(finding, **changed)


def said(verdict: Any, side: str | None = None) -> Judgement:
    return Judgement(verdict, "both arms are what they are", 8, 1.0, 1.2, side)


def test_rounding_leaves_the_operator_alone_and_may_be_confirmed() -> None:
    judged = with_recurrence(found(), said("rounding"))
    assert (judged.kinds, judged.grade) == (("operator",), "probable")
    assert verdict(judged) == "rounding"
    text = judged.evidence[-1].text
    assert "the state that they went on from was right" in text
    assert text.endswith("1 later row of the finding was not judged.")
    assert with_recurrence(found(count=8), said("rounding")).evidence[-1].text.endswith("round otherwise.")
    assert condition_of_finding(judged.as_dict("match"))[::2] == ("batch_invariance", True)
    assert may_be_confirmed(judged)
    assert wants_replay(judged)
    assert wants_equal_m(judged)
    assert not wants_row_counts(judged)


@pytest.mark.parametrize("first", ["operator", "state_restore"])
def test_a_second_capture_that_was_not_recomputed_confirms_it(first: Kind) -> None:
    kinds = (first, *(kind for kind in ALL if kind != first))
    judged = with_recurrence(found(kinds), said("rounding"))
    proved = Experiment(True, 0, 600, True, repeat=(found(kinds),))
    assert confirmed(with_replay(judged, STATEFUL), proved, STATEFUL).grade == "confirmed"
    # Unless what confirms any finding is missing.
    for doubt in ({"repeat": ()}, {"changed_logprobs": 1}, {"same_batches": None}, {"symptom_shows": False}):
        doubted = replace(proved, **doubt)
        assert confirmed(with_replay(judged, STATEFUL), doubted, STATEFUL).grade == "probable"


@pytest.mark.parametrize(
    ("side", "kinds"),
    [
        ("generation", ("state_restore", "state_write", "operator")),
        ("scoring", ("operator", "state_restore", "state_write")),
    ],
)
def test_an_arm_that_is_off_leaves_its_state_and_its_function(side: str, kinds: tuple[Kind, ...]) -> None:
    judged = with_recurrence(found(), said("other_function", side))
    assert (judged.kinds, judged.grade) == (kinds, "probable")
    assert "from another state, or computes something else" in judged.evidence[-1].text
    assert condition_of_finding(judged.as_dict("match"))[::2] == ("different_function", True)
    # Which of them it is stays open, and so does the proof.
    assert not may_be_confirmed(judged)


def test_without_a_restore_no_restore_is_blamed() -> None:
    kinds: tuple[Kind, ...] = ("operator", "state_write", "not_observed")
    judged = with_recurrence(found(kinds), said("other_function", "generation"))
    assert judged.kinds == ("state_write", "operator")


def test_a_judgement_of_nothing_changes_nothing_but_says_so() -> None:
    before = found()
    after = with_recurrence(before, said("unknown"))
    assert replace(after, evidence=before.evidence) == before
    assert verdict(after) == "unknown"


@pytest.mark.parametrize("judgement", ["rounding", "other_function"])
def test_what_another_rank_may_have_added_stays_open(judgement: str) -> None:
    other = Evidence("ranks_not_compared", "Rank 1 could not be compared.", {"ranks": [1]})
    judged = with_recurrence(found(ALL, UNSEEN, other), said(judgement, "generation"))
    assert judged.kinds[-1] == "not_observed"
    assert condition_of_finding(judged.as_dict("match"))[0] is None
    assert not may_be_confirmed(judged)


def test_a_grade_that_is_low_for_another_reason_stays_low() -> None:
    equal = Evidence("history_equal", "What it was written from is equal.", {})
    assert with_recurrence(found(ALL, equal), said("rounding")).grade == "unknown"
    probable = found(ALL, equal, grade="probable")
    assert with_recurrence(probable, said("rounding")).grade == "probable"


@pytest.mark.parametrize(
    ("finding", "may"),
    [
        (found(), True),
        (found(("state_restore", "operator", "state_write", "not_observed")), True),
        (found(("operator",), Evidence("state_equal", "equal", {})), True),
        # A state that was seen to be wrong needs no recomputation, and other kinds have no such operator.
        (found(("state_restore",), Evidence("state_restore", "not what was written", {})), False),
        (found(("gap", "operator", "state_restore", "state_write", "not_observed")), False),
        (found(("not_observed",)), False),
        (found(latent=True), False),
    ],
)
def test_what_may_be_recomputed(finding: Finding, may: bool) -> None:
    assert may_be_recomputed(finding) == may
