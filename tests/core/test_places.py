"""Where differences lie: bins never lose a token, and a constant place is named."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from made_columns import made_run, make_columns

from klbench.core.kl import divergent
from klbench.core.places import AXES, profile_of, sentence


@given(
    firsts=st.lists(st.none() | st.integers(0, 31), min_size=1, max_size=12),
    axis=st.sampled_from(AXES),
    bins=st.integers(1, 90),
    data=st.data(),
)
def test_every_token_lies_in_exactly_one_bin(firsts, axis, bins, data) -> None:
    cached = data.draw(st.lists(st.integers(0, 90), min_size=len(firsts), max_size=len(firsts)))
    columns = made_run("match", firsts, cached=cached)
    profile = profile_of(columns, axis, bins)
    counted = [i for i in range(len(firsts)) if axis != "from_cached" or cached[i] > 0]
    if not counted:
        assert profile is None
        return
    assert profile is not None
    assert len(profile.compared) <= bins
    assert len(profile.edges) == len(profile.compared) + 1
    tokens = np.concatenate([np.arange(columns.start[i], columns.start[i + 1]) for i in counted])
    assert profile.compared.sum() == len(tokens)
    assert profile.divergent.sum() == divergent(columns)[tokens].sum()
    assert profile.first.sum() == profile.divergent_requests == sum(firsts[i] is not None for i in counted)


def test_one_absolute_position_is_named_whatever_the_prompts() -> None:
    lengths = [40, 47, 51, 60]
    columns = made_run("match", [97 - n for n in lengths], prompt_len=lengths, tokens=64)
    profile = profile_of(columns, "position", 70)
    assert profile is not None
    assert profile.constant == 97
    assert sentence(profile) == "all 4 divergent requests begin to differ at token position 97"
    offsets = profile_of(columns, "offset", 70)
    assert offsets is not None
    assert offsets.constant is None
    assert sentence(offsets) == "4 divergent requests begin to differ at 4 offsets, no two at the same"


def test_each_axis_says_what_its_values_are() -> None:
    lengths = [40, 47, 51, 60]
    columns = made_run(
        "decode_cache_hit", [17] * 4, prompt_len=lengths, cached=[n - 1 for n in lengths], tokens=64
    )
    profiles = {axis: profile_of(columns, axis, 70) for axis in AXES}
    said = {axis: sentence(profile) for axis, profile in profiles.items() if profile is not None}
    all_differ = "all 4 divergent requests begin to differ at"
    assert said["position"] == "4 divergent requests begin to differ at 4 token positions, no two at the same"
    assert said["offset"] == f"{all_differ} offset 17"
    assert said["from_cached"] == f"{all_differ} cached tokens + 18"


def test_a_bin_without_compared_tokens_has_no_share() -> None:
    columns = made_run("match", [0, None], prompt_len=[10, 100], tokens=4)
    profile = profile_of(columns, "position", 200)
    assert profile is not None
    share = profile.share
    assert share[0] == 1.0
    assert np.isnan(share[50])
    assert share[-1] == 0.0


def test_logprobs_that_are_no_numbers_diverge_and_have_no_size() -> None:
    columns = make_columns(prompt_len=[5], decode=[[-1.0, -1.0]], prefill=[[-1.0, float("nan")]])
    profile = profile_of(columns, "offset", 10)
    assert profile is not None
    assert profile.divergent.tolist() == [0, 1]
    assert profile.max_abs_nats.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("firsts", "said"), [([None], "no token differs"), ([3], "the one divergent request")]
)
def test_few_divergent_requests_are_said_as_such(firsts, said) -> None:
    profile = profile_of(made_run("match", firsts), "offset", 10)
    assert profile is not None
    assert sentence(profile).startswith(said)


def test_nothing_compared_has_no_profile() -> None:
    assert (
        profile_of(make_columns(prompt_len=[3], decode=[[]], prefill=[[]], dropped=[True]), "offset", 5)
        is None
    )
