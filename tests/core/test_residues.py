"""Residues, limits and places: found where they are, and never in noise, however many moduli are tried."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from klbench.core.kl import summarise
from klbench.core.residues import _at_least, place_in_batch, striking_residues, striking_splits

sys.path.insert(0, str(Path(__file__).parent))
from made_columns import made_run

SERVER = {"page_size": 16, "chunked_prefill_size": 512, "sliding_window": 100, "conv_width": 3}


def columns_of(lengths: list[int], dirty: list[bool], first: int = 1) -> tuple:
    part = made_run("match", [first if flag else None for flag in dirty], prompt_len=lengths, tokens=8)
    return part, summarise(part), SERVER


def test_the_dirty_requests_of_one_residue_are_found_with_the_setting_that_it_is() -> None:
    lengths = [16 * (4 + i) + (3 if i % 5 == 0 else 5 + i % 7) for i in range(40)]
    best = striking_residues(*columns_of(lengths, [length % 16 == 3 for length in lengths]))[0]
    assert (best.quantity, best.modulus, best.residue, best.setting) == ("prompt_len", 16, 3, "page_size")
    assert best.exclusive
    assert best.complete
    assert "and no other" in best.sentence
    assert "page size" in best.sentence


def test_the_clean_requests_of_one_residue_are_found() -> None:
    lengths = [64 * (2 + i // 2) if i % 2 else 70 + 13 * i for i in range(40)]
    found = striking_residues(*columns_of(lengths, [length % 64 != 0 for length in lengths]))
    assert any(r.of_clean and r.modulus == 64 and r.residue == 0 and r.complete for r in found)


def test_a_few_exceptions_do_not_hide_a_residue() -> None:
    lengths = [8 * (5 + i) + (3 if i % 4 in (1, 2) else i % 7 + (i % 7 >= 3)) for i in range(60)]
    dirty = [length % 8 == 3 for length in lengths]
    dirty[0] = True
    best = striking_residues(*columns_of(lengths, dirty))[0]
    assert (best.modulus, best.residue, best.exclusive) == (8, 3, False)
    assert best.sentence.startswith("most")


@given(st.integers(0, 10_000), st.integers(3, 29))
def test_noise_is_rarely_called_a_residue(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    lengths = [int(n) for n in random.choice(np.arange(150, 450), 32, replace=False)]
    dirty = np.zeros(32, dtype=bool)
    dirty[random.choice(32, count, replace=False)] = True
    # One in a hundred runs may have one; hypothesis tries a hundred, so the bound here is far below.
    found = striking_residues(*columns_of(lengths, dirty.tolist()))
    assert all(residue.chance > 1e-5 for residue in found)


def test_of_a_thousand_noisy_runs_hardly_one_shows_a_residue() -> None:
    random = np.random.default_rng(8)
    false = 0
    for _ in range(300):
        lengths = [int(n) for n in random.choice(np.arange(150, 450), 32, replace=False)]
        dirty = (random.random(32) < 0.4).tolist()
        false += bool(striking_residues(*columns_of(lengths, dirty)))
    assert false <= 6


def test_equal_lengths_say_nothing() -> None:
    assert striking_residues(*columns_of([128] * 20, [i < 10 for i in range(20)])) == ()


@given(st.data())
def test_the_tail_is_the_hypergeometric_one(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 30))
    marked, drawn = data.draw(st.integers(0, total)), data.draw(st.integers(0, total))
    x = data.draw(st.integers(0, min(marked, drawn)))
    exact = sum(
        math.comb(marked, i) * math.comb(total - marked, drawn - i) for i in range(x, min(marked, drawn) + 1)
    ) / math.comb(total, drawn)
    assert math.isclose(_at_least(x, total, marked, drawn), exact, rel_tol=1e-9, abs_tol=1e-12)


def test_longer_than_a_chunk_is_found_as_a_limit() -> None:
    lengths = [300 + 17 * ((i * 13) % 32) for i in range(32)]
    split = striking_splits(*columns_of(lengths, [length > 512 for length in lengths]))[0]
    assert split.above
    assert split.boundary == ("chunked_prefill_size", 512)
    assert "512" in split.sentence


def test_mixed_lengths_are_no_limit() -> None:
    lengths = [300 + 17 * i for i in range(32)]
    assert striking_splits(*columns_of(lengths, [i % 2 == 0 for i in range(32)])) == ()


def test_places() -> None:
    lengths = [101 + 7 * ((i * 11) % 32) for i in range(32)]

    def kind(dirty: list[bool]) -> str | None:
        part, summary, _ = columns_of(lengths, dirty)
        place = place_in_batch(part, summary)
        return place.kind if place is not None else None

    assert kind([i > 0 for i in range(32)]) == "first_spared"
    assert kind([i >= 20 for i in range(32)]) == "tail"
    assert kind([i < 12 for i in range(32)]) == "head"
    assert kind([10 <= i < 20 for i in range(32)]) == "block"
    assert kind([i % 2 == 0 for i in range(32)]) is None
    assert kind([True] * 32) is None
