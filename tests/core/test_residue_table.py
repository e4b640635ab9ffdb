"""The residue table: what is striking stands on top, and every line counts what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from made_columns import made_run

from klbench.core.kl import summarise
from klbench.core.residue_table import quantities, residue_table
from klbench.core.residues import moduli

SERVER = {"page_size": 16, "chunked_prefill_size": 512}


def _table(firsts, cached):
    columns = made_run("prefill_cache_hit", firsts, cached=cached)
    return columns, residue_table(columns, summarise(columns), SERVER)


def test_the_striking_residue_stands_on_top_with_its_odds() -> None:
    cached = [101 + 5 * i for i in range(64)]
    columns, lines = _table([0 if c % 8 == 3 else None for c in cached], cached)
    top = lines[0]
    assert (top.quantity, top.modulus, top.residue) == ("cached_tokens", 8, 3)
    assert top.striking
    assert top.chance < 0.01
    assert (top.divergent_there, top.clean_there) == (top.divergent, 0)
    assert top.divergent == int((columns.cached_generation % 8 == 3).sum())


def test_every_modulus_is_listed_and_every_line_counts_right() -> None:
    cached = [70 + 3 * i for i in range(12)]
    columns, lines = _table([i % 5 if i % 3 == 0 else None for i in range(12)], cached)
    assert {line.modulus for line in lines} == set(moduli(SERVER))
    assert {line.setting for line in lines if line.modulus == 16} == {"page_size"}
    dirty = summarise(columns).divergent_tokens > 0
    for line in lines:
        if line.clean_there is None:
            continue
        there = quantities(columns)[line.quantity] % line.modulus == line.residue
        assert line.divergent_there == int((there & dirty).sum())
        assert line.clean_there == int((there & ~dirty).sum())


def test_rows_of_one_tile_edge_are_found() -> None:
    lengths = [33, 58, 71, 90, 97, 105, 119, 126]
    columns = made_run("match", [193 - n if n != 33 else 64 for n in lengths], prompt_len=lengths, tokens=180)
    lines = residue_table(columns, summarise(columns), {})
    rows = [line for line in lines if line.quantity == "first divergent row" and line.striking]
    assert rows
    assert rows[0].clean_there is None
    assert rows[0].divergent_there == 8


def test_a_clean_run_has_no_table_and_cold_requests_no_cached_tokens() -> None:
    clean = made_run("match", [None] * 4)
    assert residue_table(clean, summarise(clean), SERVER) == ()
    cold = made_run("match", [0, None, 1])
    assert {line.quantity for line in residue_table(cold, summarise(cold), SERVER)} == {
        "prompt_len", "total_len", "first divergent row",
    }  # fmt: skip


def test_dropped_requests_are_left_out() -> None:
    columns = made_run("prefill_cache_hit", [0, None, 0, None], cached=[3, 4, 11, 12])
    dropped = columns.dropped.copy()
    dropped[0] = True
    from dataclasses import replace

    part = replace(columns, dropped=dropped)
    lines = residue_table(part, summarise(part), {})
    assert {line.divergent for line in lines} == {1}
    assert {line.clean for line in lines} == {2}
    assert np.all([line.divergent_there <= 1 for line in lines])
