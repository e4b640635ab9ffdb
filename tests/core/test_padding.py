"""Padding to a residue: the pads reach it, the prediction comes first and can be refuted."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from made_columns import made_run

from klbench.core.kl import summarise
from klbench.core.padding import (
    UNREACHABLE,
    PaddedPass,
    PadTarget,
    pads_to,
    parse_target,
    read_pad,
    residue_beside,
    striking_target,
)


@given(
    lengths=st.lists(st.integers(3, 400), min_size=1, max_size=20),
    page=st.sampled_from([1, 4, 16]),
    modulus=st.integers(2, 64),
    data=st.data(),
)
def test_a_padded_prompt_has_the_cached_tokens_that_were_wanted(lengths, page, modulus, data) -> None:
    """The cache keeps whole pages of all but a prompt's last token."""
    residue = data.draw(st.integers(0, modulus - 1))
    cached = [(n - 1) // page * page for n in lengths]
    columns = made_run("prefill_cache_hit", [0] * len(lengths), prompt_len=lengths, cached=cached)
    pads = pads_to(
        columns, PadTarget("cached_tokens", modulus, residue), residue, page_size=page, longest=None
    )
    for length, before, pad in zip(lengths, cached, pads.tolist(), strict=True):
        if pad != UNREACHABLE:
            assert pad >= 0
            assert ((length + pad - 1) // page * page) % modulus == residue
        elif before > 0:
            assert all(
                ((length + more - 1) // page * page) % modulus != residue for more in range(page * modulus)
            )


@given(
    lengths=st.lists(st.integers(3, 400), min_size=1, max_size=20),
    modulus=st.integers(2, 64),
    residue=st.integers(0, 1),
)
def test_prompt_lengths_reach_every_residue_with_fewer_than_a_modulus_of_tokens(
    lengths, modulus, residue
) -> None:
    columns = made_run("match", [0] * len(lengths), prompt_len=lengths)
    pads = pads_to(columns, PadTarget("prompt_len", modulus, residue), residue, page_size=1, longest=None)
    assert ((pads >= 0) & (pads < modulus)).all()
    assert ((columns.prompt_len + pads) % modulus == residue).all()


def test_a_prompt_that_would_not_fit_is_not_padded() -> None:
    columns = made_run("match", [0, 0], prompt_len=[30, 34])
    pads = pads_to(columns, PadTarget("prompt_len", 64, 40), 40, page_size=1, longest=39)
    assert pads.tolist() == [UNREACHABLE, UNREACHABLE]


def _passes(inside, beside):
    """Two passes of four requests whose cached tokens are 3 and 4 mod 8; lists of first offsets."""
    one = made_run("prefill_cache_hit", inside, prompt_len=[12, 20, 28, 36], cached=[11, 19, 27, 35])
    two = made_run("prefill_cache_hit", beside, prompt_len=[13, 21, 29, 37], cached=[12, 20, 28, 36])
    every = np.ones(4, dtype=np.bool_)
    return PaddedPass(one, 3, every), PaddedPass(two, 4, every)


TARGET = PadTarget("cached_tokens", 8, 3)


@pytest.mark.parametrize(
    ("inside", "beside", "outcome"),
    [
        ([0, 0, 0, 0], [None] * 4, "predicted"),
        ([0, 0, 0, None], [None] * 4, "partly"),
        ([0, 0, 0, 0], [None, None, 0, None], "partly"),
        ([0, 0, 0, 0], [0, 0, 0, 0], "refuted"),
        ([None] * 4, [None] * 4, "refuted"),
        ([None] * 4, [0, 0, 0, 0], "refuted"),
    ],
)
def test_the_outcome_says_whether_the_requests_followed(inside, beside, outcome) -> None:
    made = read_pad(TARGET, *_passes(inside, beside))
    assert made.outcome == outcome
    assert made.values["prediction"] == TARGET.prediction(4)


def test_a_residue_of_clean_requests_predicts_the_opposite() -> None:
    target = replace(TARGET, of_clean=True)
    assert "= 3 mod 8 every request is clean" in target.prediction(4)
    assert read_pad(target, *_passes([None] * 4, [0] * 4)).outcome == "predicted"
    assert read_pad(target, *_passes([0] * 4, [None] * 4)).outcome == "refuted"


def test_requests_that_missed_their_residue_are_not_counted() -> None:
    one, two = _passes([0, None, 0, 0], [None] * 4)
    padded = np.array([True, False, True, True])
    made = read_pad(TARGET, replace(one, padded=padded), two)
    assert (made.outcome, made.values["reached"]) == ("predicted", 3)
    nothing = read_pad(TARGET, replace(one, padded=np.zeros(4, dtype=np.bool_)), two)
    assert nothing.outcome == "not_comparable"


def test_the_most_striking_residue_is_taken_and_the_other_lies_where_requests_are_clean() -> None:
    cached = [101 + 5 * i for i in range(64)]
    firsts = [0 if c % 8 in (3, 4) else None for c in cached]
    columns = made_run("prefill_cache_hit", [0 if c % 8 == 3 else None for c in cached], cached=cached)
    target = striking_target(columns, summarise(columns), {})
    assert target == TARGET
    both = made_run("prefill_cache_hit", firsts, cached=cached)
    assert residue_beside(both, summarise(both), TARGET) not in (3, 4)
    clean = made_run("match", [None] * 4)
    assert striking_target(clean, summarise(clean), {}) is None


def test_a_residue_is_read_as_it_is_written() -> None:
    assert parse_target("cached_tokens%8=3") == TARGET
    for wrong in ("cached_tokens%8=8", "cached_tokens%1=0", "tokens%8=3", "cached_tokens%8", ""):
        with pytest.raises(ValueError):
            parse_target(wrong)
