"""The arithmetic is sglang's to the last bit, and nothing that was not compared looks equal."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klbench.core.kl import divergent, helper_result, not_measured, summarise

sys.path.insert(0, str(Path(__file__).parent))
from made_columns import make_columns

nats = st.floats(min_value=-60, max_value=0, width=32)
requests = st.lists(st.lists(st.tuples(nats, nats), min_size=1, max_size=40), min_size=1, max_size=12)


def stock_average(
    input_logprobs: list[list[float]], output_logprobs: list[list[float]]
) -> tuple[float, list[float]]:
    """compare_kl_divergence of sglang/test/kl_test_utils.py, line by line."""
    kl_divs = []
    for input_logprob, output_logprob in zip(input_logprobs, output_logprobs, strict=True):
        logr = np.array(input_logprob) - np.array(output_logprob)
        kl_approx = (np.exp(logr) - 1) - logr
        kl_divs.append(np.mean(kl_approx))
    return sum(kl_divs) / len(kl_divs), kl_divs


@given(requests)
def test_the_mean_is_sglangs_to_the_last_bit(pairs: list[list[tuple[float, float]]]) -> None:
    prefill = [[a for a, _ in request] for request in pairs]
    decode = [[b for _, b in request] for request in pairs]
    columns = make_columns(prompt_len=[5] * len(pairs), decode=decode, prefill=prefill)
    average, per_request = stock_average(prefill, decode)
    summary = summarise(columns)
    assert summary.avg_kl_nats == average
    assert summary.kl_nats.tolist() == per_request


@given(requests)
def test_clean_means_that_every_token_is_bit_equal(pairs: list[list[tuple[float, float]]]) -> None:
    prefill = [[a for a, _ in request] for request in pairs]
    decode = [[b for _, b in request] for request in pairs]
    result = helper_result(make_columns(prompt_len=[5] * len(pairs), decode=decode, prefill=prefill))
    equal = all(math.copysign(1, a) == math.copysign(1, b) and a == b for r in pairs for a, b in r)
    assert (result["status"] == "clean") == equal
    assert (result["divergent_tokens"] == 0) == equal
    assert (result["bit_equal_fraction"] == 1.0) == equal


def test_a_difference_that_the_mean_cannot_see_is_still_a_divergence() -> None:
    columns = make_columns(prompt_len=[3], decode=[[0.0]], prefill=[[-0.0]])
    result = helper_result(columns)
    assert result["avg_kl_div"] == 0.0
    assert (result["status"], result["divergent_tokens"]) == ("diverged", 1)


def test_the_threshold_moves_only_the_line_between_clean_and_diverged() -> None:
    columns = make_columns(prompt_len=[3], decode=[[-1.0, -2.0]], prefill=[[-1.0, -2.001]])
    strict, loose = helper_result(columns), helper_result(columns, threshold_nats=1e-3)
    assert (strict.pop("status"), loose.pop("status")) == ("diverged", "clean")
    assert (strict.pop("threshold"), loose.pop("threshold")) == (0.0, 1e-3)
    assert strict == loose
    assert strict["divergent_tokens"] == 1


def test_the_tail_stands_beside_the_mean() -> None:
    columns = make_columns(prompt_len=[3], decode=[[-1.0] * 4], prefill=[[-1.0, -1.0, -1.5, -3.0]])
    result = helper_result(columns)
    assert result["max_abs_dlogprob"] == 2.0
    assert result["bit_equal_fraction"] == 0.5
    assert result["fraction_past"]["1e-9"] == 0.5
    assert result["fraction_past"]["1e-1"] == 0.5
    assert result["fraction_past"]["1"] == 0.25
    assert result["requests_detail"][0]["first_divergence"] == {"offset": 2, "position": 5}


def test_a_logprob_that_is_no_number_is_named_and_never_averaged() -> None:
    columns = make_columns(
        prompt_len=[3, 3], decode=[[-1.0, -1.0], [-1.0, np.nan]], prefill=[[-1.0, -1.0], [-1.0, np.nan]]
    )
    result = helper_result(columns, threshold_nats=1.0)
    assert result["nan_count"] == 1
    assert result["avg_kl_div"] is None
    assert result["status"] == "diverged"
    assert "first request 1, offset 1, position 4" in result["reason"]
    assert [detail["kl"] for detail in result["requests_detail"]] == [0.0, None]
    assert divergent(columns).tolist() == [False, False, False, True]


def test_a_dropped_request_has_no_numbers_and_is_counted() -> None:
    columns = make_columns(
        "prefill_cache_hit",
        prompt_len=[3, 4, 5],
        decode=[[-1.0], [], [-2.0]],
        prefill=[[-1.0], [], [-2.0]],
        cached=[2, 0, 4],
        dropped=[False, True, False],
    )
    result = helper_result(columns)
    assert (result["status"], result["hits"], result["dropped"], result["requests"]) == ("clean", 2, 1, 3)
    assert result["requests_detail"][1]["kl"] is None
    assert result["requests_detail"][1]["dropped"] is True


@pytest.mark.parametrize(
    ("hits", "status"), [(0, "not_run"), (1, "inconclusive"), (2, "inconclusive"), (3, "clean")]
)
def test_more_than_half_of_the_requests_must_hit(hits: int, status: str) -> None:
    dropped = [index >= hits for index in range(4)]
    logprobs = [[] if flag else [-1.0] for flag in dropped]
    columns = make_columns(
        "decode_cache_hit", prompt_len=[3] * 4, decode=logprobs, prefill=logprobs, dropped=dropped
    )
    result = helper_result(columns)
    assert result["status"] == status
    assert (result["reason"] is None) == (status == "clean")
    if status == "not_run":
        assert "0 of 4 requests hit the cache" in result["reason"]
        assert result["bit_equal_fraction"] is None


def test_few_hits_that_differ_are_a_divergence() -> None:
    columns = make_columns(
        "prefill_cache_hit",
        prompt_len=[3] * 4,
        decode=[[-1.0], [], [], []],
        prefill=[[-1.1], [], [], []],
        dropped=[False, True, True, True],
    )
    assert helper_result(columns)["status"] == "diverged"


def test_prompts_within_a_page_are_the_reason_for_no_hit() -> None:
    columns = make_columns("prefill_cache_hit", prompt_len=[9], decode=[[]], prefill=[[]], dropped=[True])
    assert "longer than a page of 16" in helper_result(columns, page_size=16)["reason"]


def test_hits_inside_match_are_said() -> None:
    same = [[-1.0], [-1.0]]
    columns = make_columns(prompt_len=[9, 9], decode=same, prefill=same, cached=[0, 8])
    result = helper_result(columns)
    assert (result["status"], result["hits"]) == ("clean", 1)
    assert "share a prefix" in result["reason"]


def test_requests_that_end_early_are_said() -> None:
    same = [[-1.0, -1.0], [-1.0]]
    result = helper_result(make_columns(prompt_len=[3, 3], decode=same, prefill=same), max_new_tokens=2)
    assert "1 request ended before 2 tokens, first request 1 with 1" in result["reason"]


def test_what_was_not_measured_has_a_reason_and_no_zeros() -> None:
    result = not_measured("not_run", "radix cache off", requests=4)
    assert (result["status"], result["reason"]) == ("not_run", "radix cache off")
    assert [result[name] for name in ("avg_kl_div", "divergent_tokens", "bit_equal_fraction")] == [None] * 3
