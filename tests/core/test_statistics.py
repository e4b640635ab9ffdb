"""The numbers beside the average: each can be recomputed by hand; what is not finite is never averaged."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from klbench.core.kl import summarise
from klbench.core.statistics import bootstrap_interval, per_offset, sample_warning, statistics

sys.path.insert(0, str(Path(__file__).parent))
from made_columns import made_run, make_columns


def test_one_divergent_token_shows_in_every_number() -> None:
    decode = [[-1.0, -2.0, -3.0, -4.0]] * 2
    prefill = [[-1.0, -2.0, -3.0, -4.0], [-1.0, -2.5, -3.0, -4.0]]
    numbers = statistics(make_columns(prompt_len=[3, 5], decode=decode, prefill=prefill))
    r = -0.5
    k3 = np.exp(r) - 1 - r
    assert numbers.mean_nats == pytest.approx(k3 / 4 / 2)
    assert (numbers.divergent_tokens, numbers.bit_equal_fraction) == (1, 1 - 1 / 8)
    assert numbers.max_abs_nats == 0.5
    assert numbers.fraction_past["1e-1"] == 1 / 8
    assert numbers.fraction_past["1"] == 0
    assert numbers.percentiles_nats["50"] == 0
    assert numbers.percentiles_nats["99.9"] == pytest.approx(0.5, rel=0.02)
    assert [(b.low_nats, b.tokens) for b in numbers.histogram if b.tokens] == [(0.0, 7), (0.1, 1)]
    assert numbers.per_offset.divergent.tolist() == [0, 1, 0, 0]
    assert numbers.per_offset.mean_k3_nats[1] == pytest.approx(k3 / 2)


def test_the_average_is_the_helpers_own() -> None:
    columns = made_run("match", [None, 1, 5, None])
    assert statistics(columns).mean_nats == summarise(columns).avg_kl_nats


def test_a_clean_run_has_an_interval_of_zero() -> None:
    numbers = statistics(made_run("match", [None] * 8))
    assert numbers.interval_nats == (0.0, 0.0)
    assert numbers.max_abs_nats == 0.0


def test_not_a_number_is_counted_and_not_averaged() -> None:
    columns = make_columns(prompt_len=[3], decode=[[-1.0, -2.0]], prefill=[[-1.0, float("nan")]])
    numbers = statistics(columns)
    assert (numbers.nan_count, numbers.mean_nats, numbers.max_abs_nats) == (1, None, 0.0)
    assert np.isnan(numbers.per_offset.mean_k3_nats[1])
    assert numbers.divergent_tokens == 1


def test_nothing_compared_gives_no_number() -> None:
    columns = make_columns(prompt_len=[3], decode=[[]], prefill=[[]], dropped=[True])
    numbers = statistics(columns)
    assert numbers.mean_nats is None
    assert numbers.max_abs_nats is None
    assert numbers.interval_nats is None
    assert numbers.percentiles_nats == {}
    assert numbers.warning is None


def test_requests_of_other_lengths_share_their_offsets() -> None:
    columns = make_columns(prompt_len=[3, 4], decode=[[-1.0], [-1.0, -2.0]], prefill=[[-1.0], [-1.0, -2.25]])
    found = per_offset(columns)
    assert found.tokens.tolist() == [2, 1]
    assert found.max_abs_nats.tolist() == [0.0, 0.25]


def test_the_interval_is_the_same_twice_and_holds_the_mean() -> None:
    kl = np.random.default_rng(1).exponential(1e-3, 32)
    first = bootstrap_interval(kl)
    assert first == bootstrap_interval(kl)
    assert first is not None
    assert first[0] < kl.mean() < first[1]
    assert bootstrap_interval(kl, seed=2) != first
    assert bootstrap_interval(kl[:1]) is None


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(4)
    covered = 0
    for _ in range(100):
        low, high = bootstrap_interval(random.normal(5.0, 1.0, 64), resamples=400) or (0.0, 0.0)
        covered += low <= 5.0 <= high
    assert 85 <= covered <= 100


def test_many_requests_are_drawn_in_parts_that_fit_in_memory() -> None:
    low, high = bootstrap_interval(np.full(200_000, 2.5), resamples=30) or (0.0, 0.0)
    assert (low, high) == (2.5, 2.5)


def test_fewer_samples_than_sglangs_are_warned_about() -> None:
    assert "8 requests of at most 32 tokens" in (sample_warning(made_run("match", [None] * 8)) or "")
    assert sample_warning(made_run("match", [None] * 32, tokens=512)) is None
