"""What it takes to confirm a finding, and what a finding says when something of it is missing."""

from dataclasses import replace

import pytest

from klbench.core.census import Damage, OperatorReplay
from klbench.core.confirmation import (
    Experiment,
    arms_differ,
    confirmed,
    may_be_confirmed,
    same_origin,
    wants_equal_m,
    wants_row_counts,
    with_replay,
)
from klbench.core.findings import Evidence, Finding

FINDING = Finding(
    kinds=("operator",),
    module="model.layers.1.self_attn.o_proj",
    call=0,
    operator=17,
    layer=1,
    request=2,
    arm="generation",
    rank=0,
    phase="decode",
    first_position=120,
    count=8,
    grade="probable",
    latent=False,
    evidence=(Evidence("origin", "inputs equal, output differs", {"batch_rows": [12, 900]}),),
)
REPLAY = OperatorReplay(
    module=FINDING.module,
    call=0,
    class_name="RowParallelLinear",
    order=0,
    rank=0,
    status="not_invariant",
    reason="",
    total=127,
    tried=(1, 8, 12, 32, 64, 127, 900),
    judged=(120,),
    variants=((0, 0, 0, 0, 1, 1, 1),),
    damage=Damage(22, 50, 128, 0, "scattered", "0"),
)
INVARIANT = replace(REPLAY, status="invariant", variants=((0,) * 7,), damage=None)
PROVED = Experiment(
    symptom_shows=True, changed_logprobs=0, compared_logprobs=600, same_batches=True, repeat=(FINDING,)
)


def judged(finding=FINDING, experiment=PROVED, replayed=REPLAY):
    """The finding after its replay and the proofs."""
    return confirmed(with_replay(finding, replayed), experiment, replayed)


def missing(finding):
    """The codes of what is missing, None for a finding that does not say so."""
    return next((fact.values["missing"] for fact in finding.evidence if fact.code == "not_confirmed"), None)


def test_a_finding_with_every_proof_is_confirmed_and_names_the_m():
    finding = judged()
    assert finding.grade == "confirmed"
    assert finding.replay_m == 64
    assert finding.as_dict("match")["replay_M"] == 64
    assert {fact.code for fact in finding.evidence} == {"origin", "replay_changes", "confirmed"}
    (fact,) = (fact for fact in finding.evidence if fact.code == "replay_changes")
    assert "1, 8, 12, 32 rows and others from 64 rows on, by at most 22 ulps" in fact.text


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"symptom_shows": False}, "symptom_gone"),
        ({"changed_logprobs": 1}, "logprobs"),
        ({"compared_logprobs": 0}, "logprobs"),
        ({"same_batches": False}, "other_batch"),
        ({"same_batches": None}, "other_batch"),
        ({"repeat": None, "no_repeat": "the disk was full"}, "no_repeat"),
        ({"repeat": ()}, "repeat_differs"),
        ({"repeat": (replace(FINDING, first_position=121),)}, "repeat_differs"),
    ],
    ids=[
        "symptom-gone", "logprobs-changed", "logprobs-unknown", "other-batch", "batch-unknown", "no-repeat",
        "nothing-again", "elsewhere-again",
    ],
)  # fmt: skip
def test_a_missing_proof_leaves_the_grade_and_is_said(change, code):
    finding = judged(experiment=replace(PROVED, **change))
    assert finding.grade == "probable"
    assert missing(finding) == [code]


def test_several_kinds_are_not_confirmed():
    finding = replace(FINDING, kinds=("operator", "state_write"))
    assert not may_be_confirmed(finding)
    experiment = replace(PROVED, repeat=(finding,))
    assert missing(judged(finding, experiment)) == ["several_kinds"]


def test_an_operator_that_is_invariant_alone_is_not_confirmed():
    finding = judged(replayed=INVARIANT)
    assert finding.grade == "probable"
    assert finding.replay_m is None
    assert missing(finding) == ["replay"]
    assert "replay_invariant" in {fact.code for fact in finding.evidence}


def with_fact(finding, code, **values):
    return replace(finding, evidence=(*finding.evidence, Evidence(code, f"{code}.", values)))


def test_an_operator_that_is_invariant_alone_is_confirmed_where_one_row_differs_in_both_arms():
    invariant = with_replay(FINDING, INVARIANT)
    assert wants_equal_m(invariant)
    assert not wants_equal_m(FINDING)
    otherwise = with_fact(invariant, "equal_m", outcome="differs", stateful=False)
    finding = confirmed(otherwise, PROVED, INVARIANT)
    assert finding.grade == "confirmed"
    assert "it shows with one row in both forwards, too" in finding.evidence[-1].text
    same = with_fact(invariant, "equal_m", outcome="same_bits", stateful=False)
    assert missing(confirmed(same, PROVED, INVARIANT)) == ["replay"]


def test_other_row_counts_are_asked_for_where_there_is_nothing_to_call_again():
    gap = replace(FINDING, kinds=("gap",), module="model.norm -> lm_head")
    attention = with_fact(replace(FINDING, module="model.layers.1.self_attn.attn"), "state_equal")
    assert wants_row_counts(gap)
    assert wants_row_counts(attention)
    assert wants_row_counts(with_fact(attention, "attention_reference", verdict="unknown"))
    assert not wants_row_counts(with_fact(attention, "attention_reference", verdict="rounding"))
    assert not wants_row_counts(FINDING)
    assert not wants_row_counts(replace(gap, latent=True))
    assert not wants_row_counts(replace(gap, kinds=("gap", "not_observed")))
    changes = with_fact(gap, "row_counts", outcome="changes")
    text = confirmed(changes, replace(PROVED, repeat=(gap,)), None).evidence[-1].text
    assert "forwards that differ in their row count alone show it too" in text


def test_a_change_at_row_counts_that_no_arm_had_explains_nothing():
    between = replace(REPLAY, variants=((0, 1, 0, 1, 1, 1, 0),))
    assert arms_differ(FINDING, between) is False
    assert missing(judged(replayed=between)) == ["replay"]


STATEFUL = replace(REPLAY, status="stateful", tried=(), variants=(), reason="it reads the K/V")


def test_an_operator_that_reads_state_needs_no_replay():
    reads = replace(FINDING, evidence=(*FINDING.evidence, Evidence("state_equal", "equal", {})))
    assert judged(reads, replayed=STATEFUL).grade == "confirmed"


def test_one_that_reads_none_and_is_given_a_cache_needs_a_proof_of_its_own():
    given = with_replay(FINDING, STATEFUL)
    assert wants_equal_m(given)
    assert missing(confirmed(given, PROVED, STATEFUL)) == ["not_replayed"]
    for outcome in ("differs", "same_bits"):
        fact = Evidence("equal_m", "made", {"outcome": outcome, "stateful": False})
        shown = replace(given, evidence=(*given.evidence, fact))
        # What the cache holds was not compared.
        assert confirmed(shown, PROVED, STATEFUL).grade == "probable"


@pytest.mark.parametrize(("outcome", "grade"), [("differs", "confirmed"), ("same_bits", "probable")])
@pytest.mark.parametrize("status", ["skipped", "error"])
def test_one_that_cannot_be_cut_is_confirmed_by_one_row_in_both_arms(status, outcome, grade):
    lost = replace(STATEFUL, status=status, reason="cannot be cut")
    given = with_replay(FINDING, lost)
    fact = Evidence("equal_m", "made", {"outcome": outcome, "stateful": False})
    shown = replace(given, evidence=(*given.evidence, fact))
    assert confirmed(shown, PROVED, lost).grade == grade


def test_one_that_gives_other_bits_each_time_is_not_compared_at_equal_m():
    restless = replace(STATEFUL, status="not_repeatable", reason="other bits")
    given = with_replay(FINDING, restless)
    assert not wants_equal_m(given)
    fact = Evidence("equal_m", "made", {"outcome": "differs", "stateful": False})
    shown = replace(given, evidence=(*given.evidence, fact))
    assert missing(confirmed(shown, PROVED, restless)) == ["not_replayed"]


@pytest.mark.parametrize("status", ["not_repeatable", "error", "skipped"])
def test_an_operator_that_could_not_be_called_again_is_not_confirmed(status):
    lost = replace(REPLAY, status=status, tried=(), variants=(), reason="cannot be cut")
    finding = judged(replayed=lost)
    assert missing(finding) == ["not_replayed"]


def test_a_replay_that_failed_says_why():
    finding = confirmed(with_replay(FINDING, None, "rank 0 does not answer"), PROVED, None)
    assert missing(finding) == ["not_replayed"]
    assert any("rank 0 does not answer" in fact.text for fact in finding.evidence)


def test_a_gap_is_confirmed_without_a_replay():
    gap = replace(FINDING, kinds=("gap",), module="model.norm -> lm_head")
    assert confirmed(gap, replace(PROVED, repeat=(gap,)), None).grade == "confirmed"


def of_head(**values):
    """A finding of the LM head whose origin says `values`."""
    return replace(FINDING, kinds=("head",), module="lm_head", evidence=(Evidence("origin", "", values),))


def test_the_functions_of_the_head_are_called_again_as_operators_are():
    head = of_head(batch_rows=[12, 900], head_rows=[12, 900])
    experiment = replace(PROVED, repeat=(head,))
    assert judged(head, experiment).grade == "confirmed"
    assert missing(judged(head, experiment, INVARIANT)) == ["replay"]
    logits = replace(head, module="logits")
    assert confirmed(logits, replace(PROVED, repeat=(logits,)), None).grade == "confirmed"


@pytest.mark.parametrize("change", [{"grade": "unknown"}, {"latent": True}])
def test_nothing_is_raised_from_unknown_and_a_latent_finding_is_left_alone(change):
    finding = replace(FINDING, **change)
    assert confirmed(finding, replace(PROVED, repeat=(finding,)), REPLAY) == finding


def test_the_same_origin_is_the_same_point():
    assert same_origin(FINDING, replace(FINDING, evidence=(), ulp_max=3, grade="unknown", count=9))
    for change in ({"kinds": ("gap",)}, {"module": "x"}, {"arm": "warming"}, {"rank": 1}, {"call": 1}):
        assert not same_origin(FINDING, replace(FINDING, **change))


def test_the_logprob_is_two_functions_so_one_that_repeats_itself_is_no_doubt():
    logprob = replace(FINDING, kinds=("head",), module="logprob")
    assert judged(logprob, replace(PROVED, repeat=(logprob,)), INVARIANT).grade == "confirmed"


def test_the_rows_of_a_forward_are_not_those_of_its_head():
    # Both row counts of the forwards lie where the operator changes; its own were other ones.
    head = of_head(batch_rows=[64, 900], head_rows=[1, 900])
    assert judged(head, replace(PROVED, repeat=(head,))).grade == "confirmed"
    alike = of_head(batch_rows=[12, 900], head_rows=[64, 900])
    assert missing(judged(alike, replace(PROVED, repeat=(alike,)))) == ["replay"]


def test_bits_that_change_somewhere_prove_nothing_where_the_arms_row_counts_were_not_compared():
    unknown = of_head(batch_rows=[12, 900])
    assert missing(judged(unknown, replace(PROVED, repeat=(unknown,)))) == ["arms_not_tried"]
    # The largest M could not be tried.
    short = replace(REPLAY, tried=REPLAY.tried[:-1], variants=(REPLAY.variants[0][:-1],))
    assert arms_differ(FINDING, short) is None
    assert missing(judged(replayed=short)) == ["arms_not_tried"]


def test_a_recomputed_finding_is_repeated_by_one_that_leaves_its_kind_open():
    said = Evidence("delta_rule_reference", "it rounds", {"verdict": "rounding"})
    found = replace(FINDING, evidence=(*FINDING.evidence, said))
    again = replace(FINDING, kinds=("state_restore", "operator", "state_write"), grade="unknown")
    assert same_origin(found, again)
    # Nothing was recomputed, or the repeat does not leave it: another origin.
    assert not same_origin(FINDING, again)
    assert not same_origin(found, replace(again, kinds=("state_restore",)))
    assert not same_origin(found, replace(again, first_position=121))


def test_a_recurrence_that_only_rounds_wants_no_other_forwards_to_tell():
    reads = replace(FINDING, evidence=(*FINDING.evidence, Evidence("history_not_observed", "unseen", {})))
    for verdict, wanted in (("unknown", True), ("rounding", False), ("other_function", False)):
        assert wants_row_counts(with_fact(reads, "delta_rule_reference", verdict=verdict)) == wanted
