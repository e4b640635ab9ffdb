"""A token whose decode logprob the server lost is in no number, and all numbers of the others stay."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klbench.core.before_after import compare_columns
from klbench.core.calibration import noise_floor
from klbench.core.columns import HelperColumns, compared_in_both
from klbench.core.exercised import what_was_exercised
from klbench.core.explain_functions import definition
from klbench.core.kl import divergent, helper_result, summarise
from klbench.core.padding import PadTarget, _seen, residue_beside
from klbench.core.passes import chosen, compare_passes, read_alone, read_toggle, read_wide_restore
from klbench.core.places import profile_of
from klbench.core.residue_table import residue_table
from klbench.core.residues import place_in_batch
from klbench.core.scene import make_scene
from klbench.core.sharing import read_sharing
from klbench.core.signature import read_signature
from klbench.core.statistics import histogram, sample_warning, statistics
from klbench.engine.capture import _changed, _check_still_compared
from klbench.engine.captured_work import Work, differs, first_divergent_offset
from klbench.engine.experiments import _first_decode_offset
from klbench.errors import UndecidedError
from klbench.session.plots import helper_plots
from klbench.session.selftest.truth import _first_divergent_row

sys.path.insert(0, str(Path(__file__).parent))
from made_columns import made_run, make_columns

nats = st.floats(min_value=-60, max_value=0, width=32)
some_requests = st.lists(
    st.tuples(st.booleans(), st.lists(st.tuples(nats, nats), min_size=2, max_size=20)), min_size=1, max_size=8
)


def losing(columns: HelperColumns, *requests: int) -> HelperColumns:
    """The same measurement with the first decode logprob of these requests lost."""
    decode, lost = columns.decode_nats.copy(), np.zeros(columns.requests, dtype=np.bool_)
    decode[columns.start[list(requests)]] = np.nan
    lost[list(requests)] = True
    return replace(columns, decode_nats=decode, lost=lost)


def of_pairs(pairs: list[tuple[bool, list[tuple[float, float]]]], *, cut: bool) -> HelperColumns:
    """Columns of (lost, tokens); `cut` leaves the first token of a request that lost it out."""
    kept = [tokens[1:] if cut and lost else tokens for lost, tokens in pairs]
    columns = make_columns(
        prompt_len=[5 + (cut and lost) for lost, _ in pairs],
        decode=[[b for _, b in tokens] for tokens in kept],
        prefill=[[a for a, _ in tokens] for tokens in kept],
    )
    return columns if cut else losing(columns, *(n for n, (lost, _) in enumerate(pairs) if lost))


@given(some_requests, st.booleans())
def test_all_numbers_are_those_of_the_other_tokens(pairs: list[tuple[bool, Any]], theirs: bool) -> None:
    one, other = of_pairs(pairs, cut=False), of_pairs(pairs, cut=True)
    if theirs:
        # What another run lost is left out of this one, too.
        one = compared_in_both(of_pairs([(False, tokens) for _, tokens in pairs], cut=False), one)[0]
    lost, cut = summarise(one), summarise(other)
    for name in ("kl_nats", "divergent_tokens", "max_abs_dlogprob", "nan_requests"):
        assert np.array_equal(getattr(lost, name), getattr(cut, name)), name
    for name in ("nan_count", "tokens", "avg_kl_nats", "bit_equal_fraction", "fraction_past"):
        assert getattr(lost, name) == getattr(cut, name), name
    shift = np.where((cut.first_offset >= 0) & one.lost, 1, 0)
    assert np.array_equal(lost.first_offset, cut.first_offset + shift)
    numbers, fewer = statistics(one), statistics(other)
    for name in ("percentiles_nats", "histogram", "mean_nats", "interval_nats", "max_abs_nats", "tokens"):
        assert getattr(numbers, name) == getattr(fewer, name), name
    assert sum(numbers.per_offset.tokens) == fewer.tokens
    assert helper_plots(one) == helper_plots(other)
    profile, expected = profile_of(one, "position", 7), profile_of(other, "position", 7)
    assert profile is not None
    assert expected is not None
    assert np.array_equal(profile.compared, expected.compared)
    assert np.array_equal(profile.divergent, expected.divergent)


def test_the_reason_names_the_requests_once_and_why() -> None:
    columns = losing(made_run("match", [None, 3, None]), 0, 1)
    result = helper_result(columns)
    assert result["status"] == "diverged"
    assert result["lost"] == [0, 1]
    assert result["tokens"] == 3 * 32 - 2
    assert result["nan_count"] == 0
    assert result["reason"].count("0.5.23") == 1
    assert "the first token of each of requests 0, 1 was not compared" in result["reason"]
    assert "lost" not in helper_result(made_run("match", [None]))


def test_of_many_requests_the_first_are_named() -> None:
    reason = helper_result(losing(made_run("match", [None] * 12), *range(12)))["reason"]
    assert "requests 0, 1, 2, 3, 4, 5, 6, 7, ... was not" in reason


def test_a_run_without_a_compared_token_is_not_clean() -> None:
    columns = losing(make_columns(prompt_len=[3], decode=[[-1.0]], prefill=[[-1.0]]), 0)
    result = helper_result(columns)
    assert result["status"] == "inconclusive"
    assert result["reason"].endswith("no token was compared")
    assert result["avg_kl_div"] is None
    assert result["max_abs_dlogprob"] is None
    assert statistics(columns).mean_nats is None
    assert read_signature(columns, summarise(columns), {}).whole.requests == 0


def test_a_request_that_lost_its_only_logprob_counts_no_more_than_a_dropped_one() -> None:
    def columns(first: list[float], *, dropped: bool) -> HelperColumns:
        return make_columns(
            "prefill_cache_hit",
            prompt_len=[8 * n + 4 for n in range(16)],
            cached=[8 * n + 3 for n in range(16)],
            decode=[first, *([-1.0, -1.0] for _ in range(15))],
            prefill=[first, *([-1.0, -1.1 if n >= 8 else -1.0] for n in range(1, 16))],
            dropped=[dropped, *[False] * 15],
        )

    lost, dropped = losing(columns([-1.0], dropped=False), 0), columns([], dropped=True)
    # A request's length counts what it generated, though nothing of it was compared.
    dropped = replace(dropped, output_len=lost.output_len)
    server = {"page_size": 8}
    summaries = summarise(lost), summarise(dropped)
    assert sample_warning(lost) == sample_warning(dropped)
    assert what_was_exercised({"prefill_cache_hit": lost}, server) == what_was_exercised(
        {"prefill_cache_hit": dropped}, server
    )
    assert residue_table(lost, summaries[0], server) == residue_table(dropped, summaries[1], server)
    assert place_in_batch(lost, summaries[0]) == place_in_batch(dropped, summaries[1])
    assert place_in_batch(lost, summaries[0]) is not None
    target = PadTarget("prompt_len", 16, 12)
    beside = [
        residue_beside(part, summary, target)
        for part, summary in zip((lost, dropped), summaries, strict=True)
    ]
    assert beside[0] == beside[1]
    everyone = np.ones(16, dtype=np.bool_)
    assert _seen(lost, target, 4, everyone) == _seen(dropped, target, 4, everyone)
    signatures = [read_signature(*pair, server) for pair in zip((lost, dropped), summaries, strict=True)]
    assert signatures[0].whole == signatures[1].whole


def test_a_logprob_that_is_no_number_is_named_beside_one_that_was_lost() -> None:
    columns = made_run("match", [None, None])
    columns.decode_nats[columns.start[1] + 4] = np.nan
    result = helper_result(losing(columns, 0))
    assert result["nan_count"] == 1
    assert "first request 1, offset 4" in result["reason"]


def test_the_first_divergence_is_looked_for_behind_it() -> None:
    columns = losing(made_run("match", [0, 0]), 1)
    assert [first_divergent_offset(columns, request) for request in (0, 1)] == [0, 1]
    assert not differs(columns, columns.tokens_of(1))[0]
    assert not divergent(columns)[columns.start[1]]
    assert _first_decode_offset(losing(made_run("match", [5]), 0), 0) == 5
    assert _first_divergent_row(columns, 1) == int(columns.prompt_len[1])
    clean = losing(made_run("match", [None]), 0)
    assert first_divergent_offset(clean, 0) is None
    assert _first_divergent_row(clean, 0) is None


@pytest.mark.parametrize("which", [0, 1])
def test_two_passes_are_compared_without_what_either_lost(which: int) -> None:
    whole = made_run("match", [None, 3])
    passes = [whole, whole]
    passes[which] = losing(whole, 1)
    found = compare_passes(*passes)
    assert found.equal
    assert found.tokens == 2 * 32 - 1
    change = compare_columns(*passes)
    assert not change.differs
    assert (change.compared, change.not_compared) == (2 * 32 - 1, 1)
    floor = noise_floor(passes)
    assert floor.zero
    assert (floor.decode.tokens, floor.prefill.tokens) == (2 * 32 - 1, 2 * 32 - 1)


@pytest.mark.parametrize("which", [0, 1])
def test_a_divergence_that_only_one_run_could_see_did_not_come_or_go(which: int) -> None:
    """Request 0 diverges at its first token alone, and that logprob is lost in one of the two runs."""
    whole = make_columns(prompt_len=[20], decode=[[-1.0, -2.0]], prefill=[[-1.5, -2.0]])
    passes = [whole, whole]
    passes[which] = losing(whole, 0)
    change = compare_columns(*passes)
    assert (change.fixed, change.introduced, change.remaining) == (0, 0, 0)
    how: dict[str, Any] = {"setting": "x", "asked": {}, "in_force": {}, "composed_equally": True}
    assert read_toggle("overlap", *passes, **how).outcome == "same_bits"
    # Of one of the two it is not known whether it diverges.
    if which:
        assert read_alone(whole, 0, passes[1]).outcome == "not_comparable"
        hit = replace(whole, cached_generation=np.array([9]))
        assert read_wide_restore(hit, losing(hit, 0)).outcome == "not_comparable"


def test_other_bits_behind_what_was_lost_are_other_bits() -> None:
    whole = made_run("match", [None, 3])
    other = losing(whole, 1)
    other.decode_nats[other.start[1] + 1] -= 1
    assert compare_passes(whole, other).first == (1, 1)
    assert compare_columns(whole, other).decode_changed == 1
    assert noise_floor([whole, other]).decode.differing == 1


def test_a_capture_that_lost_it_changed_no_logprob() -> None:
    measured = made_run("match", [None, 3])
    work = Work("match", [[1], [2]], 1, measured, 32)
    assert _changed(work, losing(measured, 1)) == (0, 2 * (2 * 32 - 1))
    assert _changed(replace(work, measured=losing(measured, 1)), measured) == (0, 2 * (2 * 32 - 1))


def test_a_capture_that_lost_all_that_diverged_is_not_called_clean() -> None:
    def work(first_offsets: list[int | None], *, tokens: int) -> Work:
        return Work("match", [[1], [2]], 1, made_run("match", first_offsets, tokens=tokens), tokens)

    one = work([None, 0], tokens=1)
    with pytest.raises(UndecidedError, match="request 1 diverges again cannot be seen"):
        _check_still_compared(one, losing(one.measured, 1))
    # It is there, it is another run, more than the first token diverges, or nothing ever did.
    _check_still_compared(one, one.measured)
    _check_still_compared(one, losing(replace(one.measured, token_id=one.measured.token_id + 1), 1))
    for other in (work([None, 0], tokens=2), work([None, None], tokens=1)):
        _check_still_compared(other, losing(other.measured, 1))


def test_chosen_requests_keep_what_they_lost() -> None:
    columns = losing(made_run("match", [None, 3, None]), 2)
    assert chosen(columns, [2, 0]).lost.tolist() == [True, False]


def test_equal_prompts_agree_behind_what_one_of_them_lost() -> None:
    one = [-1.0, -2.0, -3.0]
    columns = make_columns(prompt_len=[20, 20], decode=[one, one], prefill=[one, one])
    columns = replace(columns, token_id=np.array([1, 2, 3, 1, 2, 3], dtype=np.int32))
    assert read_sharing(losing(columns, 1)).disagreeing == ()
    columns.decode_nats[4] = -9.0
    assert read_sharing(losing(columns, 1)).disagreeing == ((0, 1),)


def test_a_definition_that_differs_from_the_first_token_on_is_seen_behind_it() -> None:
    def found(columns: HelperColumns) -> Any:
        summary = summarise(columns)
        scene = make_scene([read_signature(columns, summary, {})], {"match": summary}, {})
        return definition(scene)

    whole = made_run("match", [0, 0, 0], size_nats=1e-7)
    assert found(whole).grade == found(losing(whole, 1)).grade == "probable"
    assert found(losing(whole, 0, 1, 2)) is None, "nothing shows that the first token differs"


def test_the_histogram_counts_no_lost_token() -> None:
    numbers = statistics(losing(made_run("match", [None, None]), 0))
    assert sum(part.tokens for part in numbers.histogram) == 2 * 32 - 1
    assert sum(part.tokens for part in histogram(np.zeros(3))) == 3
