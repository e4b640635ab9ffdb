"""What a run does not put to the test is said before and after it, with what would."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from klbench.core.exercised import Exercised, what_was_exercised, what_will_be_exercised

sys.path.insert(0, str(Path(__file__).parent))
from made_columns import made_run

SERVER: dict[str, Any] = {
    "page_size": 1,
    "chunked_prefill_size": 256,
    "sliding_window": 120,
    "radix_cache": True,
}


def by_code(found: list[Exercised]) -> dict[str, Exercised]:
    return {item.code: item for item in found}


def test_before_a_run_the_prompts_tell() -> None:
    found = by_code(what_will_be_exercised([40, 60], SERVER, max_new_tokens=32))
    assert found["window_not_crossed"].advice == "use longer prompts: --prompt-tokens 240"
    assert "chunk_within_request" in found
    longer = by_code(what_will_be_exercised([100, 300], SERVER, max_new_tokens=32))
    assert longer["window_crossed"].values["in_decode"] == 1
    assert "chunk_crossed" in longer


def test_before_a_run_a_server_without_restores_says_so() -> None:
    found = by_code(what_will_be_exercised([40, 60], {**SERVER, "radix_cache": False}, max_new_tokens=8))
    assert "no restore" in found["no_restore"].text
    paged = by_code(what_will_be_exercised([10, 60], {**SERVER, "page_size": 16}, max_new_tokens=8))
    assert paged["page_not_filled"].values["requests"] == 1
    assert what_will_be_exercised([], SERVER, max_new_tokens=8) == []


def test_a_single_request_exercises_no_batch() -> None:
    found = by_code(what_will_be_exercised([40], SERVER, max_new_tokens=8))
    assert found["no_batch"].advice == "use more requests: --samples 32"
    assert "no_batch" in by_code(what_was_exercised({"match": made_run("match", [None])}, SERVER))
    assert "no_batch" not in by_code(what_was_exercised({"match": made_run("match", [None] * 2)}, SERVER))


def test_after_a_run_hits_are_told_with_what_they_restored_and_extended() -> None:
    part = made_run("prefill_cache_hit", [None] * 3, prompt_len=[50, 60, 70], cached=[49, 48, 69])
    found = by_code(what_was_exercised({"prefill_cache_hit": part}, SERVER))
    assert found["restored"].values["restored_tokens"] == [48, 69]
    assert found["restored"].values["extend_rows"] == [1, 12]
    cold = by_code(what_was_exercised({"match": made_run("match", [None] * 3)}, SERVER))
    assert "no restore was tested" in cold["cold"].text


def test_checkpoints_are_passed_only_past_their_interval() -> None:
    server = {**SERVER, "checkpoint_interval": 64}
    assert "checkpoint_crossed" in by_code(what_will_be_exercised([60, 10], server, max_new_tokens=8))
    missed = by_code(what_will_be_exercised([65, 10], server, max_new_tokens=8))
    assert missed["checkpoint_not_crossed"].advice == "generate more: --max-new-tokens 64"


@pytest.mark.parametrize(
    ("graphs", "device", "said"),
    [
        (False, "cuda", True),
        (True, "cuda", False),
        (None, "cuda", False),  # the server does not say
        (False, "cpu", False),  # there are none
        (False, None, False),
    ],
)
def test_graphs_that_are_off_are_not_exercised(graphs: bool | None, device: str | None, said: bool) -> None:
    server = {**SERVER, "cuda_graphs": graphs, "device": device}
    before = by_code(what_will_be_exercised([40, 60], server, max_new_tokens=8))
    after = by_code(what_was_exercised({"match": made_run("match", [None] * 2)}, server))
    assert ("no_graphs" in before) == ("no_graphs" in after) == said
    if said:
        assert after["no_graphs"].text.endswith("in their replay was not tested")
        assert "--no-ready-to-capture" in (after["no_graphs"].advice or "")


def test_nothing_compared_exercises_nothing() -> None:
    assert what_was_exercised({}, SERVER) == []
