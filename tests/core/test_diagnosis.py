"""What the verdict concludes from a run, and above all what it does not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from klbench.core.columns import HELPERS, HelperColumns
from klbench.core.diagnosis import diagnose, first_divergent
from klbench.core.kl import helper_result, not_measured, summarise

sys.path.insert(0, str(Path(__file__).parent))
from made_columns import made_run

REQUESTS = 8
CLEAN = [None] * REQUESTS
HIT = [50 + 3 * i for i in range(REQUESTS)]
DETERMINISTIC = {"deterministic": True, "page_size": 1, "chunked_prefill_size": 4096, "sliding_window": None}


def verdict_on(*columns: HelperColumns, server: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    results = {part.helper: helper_result(part) for part in columns}
    return diagnose({**results, **more}, {part.helper: part for part in columns}, server or DETERMINISTIC)


def run(match: Any, prefill: Any, decode: Any, **how: Any) -> list[HelperColumns]:
    return [
        made_run("match", match, **how),
        made_run("prefill_cache_hit", prefill, cached=HIT, **how),
        made_run("decode_cache_hit", decode, cached=HIT, **how),
    ]


def codes(items: list[dict[str, Any]]) -> list[str]:
    return [item["code"] for item in items]


def test_three_clean_helpers_are_no_divergence() -> None:
    verdict = verdict_on(*run(CLEAN, CLEAN, CLEAN))
    assert (verdict["status"], verdict["conditions"], verdict["grade"]) == ("none", [], "probable")
    assert verdict["evidence"][0]["text"].startswith(f"all {3 * REQUESTS * 32} tokens")
    assert "few_samples" in codes(verdict["evidence"])


@pytest.mark.parametrize("status", ["not_run", "inconclusive", "error"])
def test_a_helper_without_an_answer_leaves_the_verdict_open(status: str) -> None:
    verdict = verdict_on(
        made_run("match", CLEAN), prefill_cache_hit=not_measured(status, "radix cache off", requests=REQUESTS)
    )
    assert (verdict["status"], verdict["grade"]) == ("undecided", "unknown")
    assert "radix cache off" in verdict["next"][0]["text"]


def test_nothing_measured_says_run() -> None:
    verdict = diagnose({}, {}, {})
    assert verdict["status"] == "undecided"
    assert codes(verdict["next"]) == ["run"]


def test_dirty_hits_and_clean_cold_requests_suspect_the_restore_and_name_the_deciding_experiment() -> None:
    verdict = verdict_on(*run(CLEAN, [0] * REQUESTS, [0] * REQUESTS))
    assert (verdict["status"], verdict["conditions"], verdict["grade"]) == (
        "found",
        ["different_function"],
        "probable",
    )
    assert codes(verdict["evidence"])[:3] == ["hits_only", "before_decode", "equal_m_undecided"]
    assert codes(verdict["next"])[:2] == ["locate", "wide_restore"]
    assert verdict["next"][0]["values"] == {"helper": "prefill_cache_hit", "request": 0}


def test_cached_tokens_count_and_not_the_helpers_name() -> None:
    """Prompts that share a prefix hit the cache inside match: its dirty requests are hits, too."""
    cached = [0, 0, *HIT[2:]]
    verdict = verdict_on(made_run("match", [None, None, *[1] * 6], cached=cached))
    assert verdict["conditions"] == ["different_function"]
    assert verdict["evidence"][0]["values"] == {"cold": 2, "cold_dirty": 0, "hit": 6, "hit_dirty": 6}


def test_dirty_hits_without_a_cold_control_decide_nothing() -> None:
    verdict = verdict_on(made_run("prefill_cache_hit", [1] * REQUESTS, cached=HIT))
    assert verdict["grade"] == "unknown"
    assert set(verdict["conditions"]) == {"batch_invariance", "different_function"}
    assert "run_match" in codes(verdict["next"])


def test_small_differences_from_the_first_decoded_token_everywhere_are_probably_rounding() -> None:
    verdict = verdict_on(*run([1] * REQUESTS, [1] * REQUESTS, [1] * REQUESTS))
    assert (verdict["conditions"], verdict["grade"]) == (["batch_invariance"], "probable")


@pytest.mark.parametrize("how", [{"size_nats": 0.4}, {"window": 64}])
def test_large_differences_or_a_window_leave_both_conditions_open(how: dict[str, Any]) -> None:
    server = {**DETERMINISTIC, "sliding_window": how.get("window")}
    columns = run([1] * REQUESTS, [1] * REQUESTS, [1] * REQUESTS, size_nats=how.get("size_nats", 1e-3))
    verdict = verdict_on(*columns, server=server)
    assert set(verdict["conditions"]) == {"batch_invariance", "different_function"}
    assert verdict["grade"] == "unknown"


def test_a_divergence_after_a_fixed_number_of_decode_steps_is_no_rounding() -> None:
    verdict = verdict_on(*run([17] * REQUESTS, [17] * REQUESTS, [17] * REQUESTS))
    assert (verdict["conditions"], verdict["grade"]) == (["different_function"], "probable")
    assert verdict["evidence"][1]["code"] == "constant_offset"


def test_a_constant_position_that_begins_no_tile_may_be_anything() -> None:
    lengths = [80 + i for i in range(REQUESTS)]
    verdict = verdict_on(made_run("match", [100 - length for length in lengths], prompt_len=lengths))
    assert "constant_position" in codes(verdict["hypotheses"][0]["for"])
    assert verdict["grade"] == "unknown"
    assert set(verdict["conditions"]) == {"batch_invariance", "different_function"}


def test_without_deterministic_inference_condition_one_is_settled_first() -> None:
    columns = run([1] * REQUESTS, [0] * REQUESTS, [0] * REQUESTS)
    verdict = verdict_on(*columns, server={**DETERMINISTIC, "deterministic": False})
    assert verdict["conditions"] == ["batch_invariance"]
    assert verdict["evidence"][0]["code"] == "not_deterministic"
    assert "deterministic" in codes(verdict["next"])


def test_a_run_alone_never_confirms() -> None:
    for dirty in (CLEAN, [0] * REQUESTS, [1] * REQUESTS, [17] * REQUESTS):
        for cold in (CLEAN, [1] * REQUESTS):
            assert verdict_on(*run(cold, dirty, dirty))["grade"] != "confirmed"


def test_a_residue_that_only_dirty_requests_have_is_named() -> None:
    lengths = [64 * (i + 2) + (5 if i % 2 else 11 + i) for i in range(40)]
    verdict = verdict_on(made_run("match", [0 if i % 2 else None for i in range(40)], prompt_len=lengths))
    found = [item["values"] for item in verdict["evidence"] if item["code"] == "residue"]
    assert ("prompt_len", 64, 5) in [(f["quantity"], f["modulus"], f["residue"]) for f in found]
    assert all(f["chance"] < 0.01 for f in found)


def test_chance_residues_of_few_requests_are_not_named() -> None:
    verdict = verdict_on(made_run("match", [1, 1, 1, *[None] * 5], prompt_len=[64, 128, 192, 3, 5, 7, 9, 11]))
    assert "residue" not in codes(verdict["evidence"])


def test_a_window_that_no_request_crosses_is_said_with_lengths_that_would() -> None:
    server = {**DETERMINISTIC, "sliding_window": 1024}
    verdict = verdict_on(*run(CLEAN, CLEAN, CLEAN), server=server)
    assert "window_not_crossed" in codes(verdict["evidence"])
    assert {"code": "window_not_crossed"}.items() <= verdict["next"][-1].items()
    assert "--prompt-tokens 2048" in verdict["next"][-1]["text"]
    crossed = verdict_on(*run(CLEAN, CLEAN, CLEAN), server={**DETERMINISTIC, "sliding_window": 64})
    assert "window_crossed" in codes(crossed["evidence"])
    assert crossed["next"] == []


def test_graphs_are_the_next_question_only_where_nothing_diverged() -> None:
    eager = DETERMINISTIC | {"cuda_graphs": False, "device": "cuda"}
    clean = verdict_on(*run(CLEAN, CLEAN, CLEAN), server=eager)
    assert "no_graphs" in codes(clean["evidence"])
    assert "no_graphs" in codes(clean["next"])
    dirty = verdict_on(*run([2] * REQUESTS, CLEAN, CLEAN), server=eager)
    assert "no_graphs" in codes(dirty["evidence"])
    assert "no_graphs" not in codes(dirty["next"])


@pytest.mark.parametrize("outcome", ["same_bits", "moved", "no_effect", "not_comparable", "not_possible"])
def test_graphs_that_an_experiment_switched_on_are_no_open_question(outcome: str) -> None:
    eager = DETERMINISTIC | {"cuda_graphs": False, "device": "cuda"}
    columns = run(CLEAN, CLEAN, CLEAN)
    results = {part.helper: helper_result(part) for part in columns}
    made = [{"name": "graphs", "outcome": outcome, "text": "tried"}, {"name": "overlap", "outcome": "moved"}]
    verdict = diagnose(results, {part.helper: part for part in columns}, eager, experiments=made)
    said = next(item for item in verdict["evidence"] if item["code"] == "no_graphs")
    assert said["values"]["experiment"] is (outcome in ("same_bits", "moved"))
    assert ("no_graphs" in codes(verdict["next"])) is not said["values"]["experiment"]


def test_the_first_divergent_helper_and_request_are_chosen_in_the_helpers_order() -> None:
    columns = run(CLEAN, [None, None, 3, *[1] * 5], [1] * REQUESTS)
    results = {part.helper: helper_result(part) for part in columns}
    summaries = {part.helper: summarise(part) for part in columns}
    assert first_divergent(results, summaries) == ("prefill_cache_hit", 2)
    assert first_divergent({}, {helper: summaries[helper] for helper in HELPERS[:1]}) is None
