"""A request that was retracted is computed again: its divergence has more causes than a signature tells."""

from typing import Any

import pytest
from situations import REQUESTS, SERVER, Run, noise, results_of

from klbench.core.diagnosis import diagnose

SMALL = noise(1e-3)


def some(request: Any) -> Any:
    """Requests 3, 7 and 9 differ a little."""
    return SMALL(request) if request.index in (3, 7, 9) else None


def verdict(retracted: object, **more: Any) -> dict[str, Any]:
    columns = [Run().helper("match", some)]
    results = results_of(columns)
    results["match"]["retracted"] = retracted
    return diagnose(results, {part.helper: part for part in columns}, SERVER, **more)


@pytest.mark.parametrize("retracted", [[3, 7, 9], list(range(REQUESTS))])
def test_where_each_divergent_request_was_retracted_both_conditions_remain(retracted: list[int]) -> None:
    found = verdict(retracted)
    assert set(found["conditions"]) == {"batch_invariance", "different_function"}
    assert found["grade"] == "unknown"
    assert found["hypotheses"][0]["code"] == "retraction"
    assert "pool" in [step["code"] for step in found["next"]]


@pytest.mark.parametrize("retracted", [[], [3, 7], [1, 2], ["3"], None, 7, [3, 7, 9999]])
def test_a_divergence_of_other_requests_is_no_retraction(retracted: object) -> None:
    assert "retraction" not in [hypothesis["code"] for hypothesis in verdict(retracted)["hypotheses"]]


def test_an_experiment_that_retracts_nothing_does_not_settle_it() -> None:
    same = {"name": "equal_m", "outcome": "same_bits", "text": "", "values": {}}
    assert verdict([3, 7, 9], experiments=[same])["grade"] == "unknown"


def test_a_located_origin_settles_it() -> None:
    finding = {
        "kind": "state_write",
        "kinds": ["state_write"],
        "module": "model.layers.1.self_attn.attn",
        "grade": "confirmed",
        "latent": False,
        "evidence": [],
    }
    found = verdict([3, 7, 9], findings=[finding])
    assert (found["conditions"], found["grade"]) == (["different_function"], "confirmed")


MOVED = {"name": "repeats", "outcome": "differs", "text": "2 of 2 repeats gave other bits", "values": {}}
UNSTEADY = {
    "kind": "state_write",
    "kinds": ["state_write"],
    "module": "model.layers.1.self_attn.attn",
    "grade": "unknown",
    "latent": False,
    "evidence": [{"code": "capture_changed_logprobs", "text": "11 changed", "values": {"count": 11}}],
}


@pytest.mark.parametrize("findings", [[], [UNSTEADY]])
@pytest.mark.parametrize("experiments", [[], [MOVED]])
def test_slots_of_earlier_owners_move_like_a_race_and_are_not_called_one(
    findings: list[Any], experiments: list[Any]
) -> None:
    found = verdict([3, 7, 9], findings=findings, experiments=experiments)
    assert "different_function" in found["conditions"]
    assert found["grade"] == "unknown"
    assert found["hypotheses"][0]["code"] == "retraction"
    assert "pool" in [step["code"] for step in found["next"]]
    assert ("race" in found["conditions"]) == bool(findings or experiments)


COPY = {"code": "state_write", "text": "", "values": {"arguments": ["k"]}}
OTHER_BATCH = {"code": "other_batch", "text": "", "values": {"forwards": 23, "same": 11}}
NOT_REPEATED = {"code": "not_repeated", "text": "", "values": {}}


@pytest.mark.parametrize("experiments", [[], [MOVED]])
@pytest.mark.parametrize("doubts", [[OTHER_BATCH], [], [NOT_REPEATED]])
def test_a_copy_that_went_wrong_is_another_function_whatever_its_batch_and_its_bits(
    doubts: list[Any], experiments: list[Any]
) -> None:
    copied = UNSTEADY | {"evidence": [COPY, *UNSTEADY["evidence"], *doubts]}
    found = verdict([3, 7, 9], findings=[copied], experiments=experiments)
    assert (found["conditions"], found["grade"]) == (["different_function"], "probable")
    assert found["hypotheses"][0]["code"] == "retraction"
    said = next(item["text"] for item in found["evidence"] if item["code"] == "finding")
    assert said.startswith("located (unknown): ")
    assert said.endswith("a copy does no arithmetic, so it is no rounding in whichever batch")
    # What a race leaves in a slot would look alike: it stays a hypothesis.
    assert "race" in [hypothesis["code"] for hypothesis in found["hypotheses"]]


def test_what_moves_without_a_retraction_is_a_race() -> None:
    found = verdict([], experiments=[MOVED])
    assert (found["conditions"], found["grade"]) == (["race"], "confirmed")


def test_a_steady_origin_decides_between_state_and_a_race() -> None:
    found = verdict([3, 7, 9], findings=[UNSTEADY | {"grade": "confirmed", "evidence": []}])
    assert (found["conditions"], found["grade"]) == (["different_function"], "confirmed")
