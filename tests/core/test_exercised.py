"""What a run does not put to the test is said before and after it, with what would."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from klbench.core.columns import HELPERS
from klbench.core.exercised import (
    Exercised,
    what_was_exercised,
    what_will_be_exercised,
    what_will_be_missed,
)

sys.path.insert(0, str(Path(__file__).parent))
from made_columns import made_run

SERVER: dict[str, Any] = {
    "page_size": 1,
    "chunked_prefill_size": 256,
    "sliding_window": 120,
    "radix_cache": True,
}


MATCH = ("match",)


def by_code(found: list[Exercised]) -> dict[str, Exercised]:
    return {item.code: item for item in found}


def test_before_a_run_the_prompts_tell() -> None:
    found = by_code(what_will_be_exercised([40, 60], SERVER, max_new_tokens=32, helpers=MATCH))
    assert found["window_not_crossed"].advice == "use longer prompts: --prompt-tokens 240"
    assert "chunk_within_request" in found
    longer = by_code(what_will_be_exercised([100, 300], SERVER, max_new_tokens=32, helpers=MATCH))
    assert longer["window_crossed"].values["in_decode"] == 1
    assert "chunk_crossed" in longer


def test_before_a_run_the_longer_second_turn_of_decode_cache_hit_counts_too() -> None:
    """60 tokens, 32 generated and a ",", and 32 more: 125 pass a window of 120, which 92 do not."""
    found = by_code(what_will_be_exercised([40, 60], SERVER, max_new_tokens=32, helpers=HELPERS))
    assert found["window_crossed"].values["crossed"] == 1
    alone = by_code(
        what_will_be_exercised([40, 60], SERVER, max_new_tokens=32, helpers=("decode_cache_hit",))
    )
    assert alone["window_crossed"].text.startswith("1 of 2 requests")


def test_what_will_be_missed_leaves_out_what_will_be_reached() -> None:
    server = {**SERVER, "chunked_prefill_size": 64, "checkpoint_interval": 512}
    missed = what_will_be_missed([40, 100], server, max_new_tokens=32, helpers=MATCH)
    assert [item.code for item in missed] == ["checkpoint_not_crossed"]
    assert missed[0].text.endswith("will not be tested")
    assert what_will_be_missed([40], server, max_new_tokens=32, helpers=()) == []


def test_before_a_run_a_server_without_restores_says_so() -> None:
    without, paged = {**SERVER, "radix_cache": False}, {**SERVER, "page_size": 16}
    found = by_code(what_will_be_exercised([40, 60], without, max_new_tokens=8, helpers=HELPERS))
    assert "no restore" in found["no_restore"].text
    short = by_code(what_will_be_exercised([10, 60], paged, max_new_tokens=8, helpers=HELPERS))
    assert short["page_not_filled"].values["requests"] == 1
    # Nobody expects match to restore anything.
    for server in (without, paged):
        cold = by_code(what_will_be_exercised([10, 60], server, max_new_tokens=8, helpers=MATCH))
        assert not {"no_restore", "page_not_filled"} & set(cold)
    assert what_will_be_exercised([], SERVER, max_new_tokens=8, helpers=HELPERS) == []


def test_a_single_request_exercises_no_batch() -> None:
    found = by_code(what_will_be_exercised([40], SERVER, max_new_tokens=8, helpers=MATCH))
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
    assert "checkpoint_crossed" in by_code(
        what_will_be_exercised([60, 10], server, max_new_tokens=8, helpers=MATCH)
    )
    missed = by_code(what_will_be_exercised([65, 10], server, max_new_tokens=8, helpers=MATCH))
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
    before = by_code(what_will_be_exercised([40, 60], server, max_new_tokens=8, helpers=MATCH))
    after = by_code(what_was_exercised({"match": made_run("match", [None] * 2)}, server))
    assert ("no_graphs" in before) == ("no_graphs" in after) == said
    if said:
        assert after["no_graphs"].text.endswith("in their replay was not tested")
        assert "--no-ready-to-capture" in (after["no_graphs"].advice or "")


def test_nothing_compared_exercises_nothing() -> None:
    assert what_was_exercised({}, SERVER) == []
