"""Passes side by side: bits are compared only where they may be; a flag without effect concludes nothing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from klbench.core.experiments import CATALOGUE, configurations, cost, make_plan, why_not
from klbench.core.passes import (
    compare_passes,
    flip_rate_bound,
    meaning,
    read_repeats,
    read_toggle,
    same_prompts,
)

sys.path.insert(0, str(Path(__file__).parent))
from made_columns import made_run
from situations import SERVER

BASE = made_run("match", [None, 3, None, 5])


def with_other_bits(columns, token: int):
    decode = columns.decode_nats.copy()
    decode[token] = np.nextafter(decode[token], np.float32(0))
    return replace(columns, decode_nats=decode)


def test_equal_passes_are_equal() -> None:
    difference = compare_passes(BASE, BASE)
    assert difference.equal
    assert (difference.tokens, difference.first) == (128, None)


def test_one_ulp_in_one_arm_is_seen_and_placed() -> None:
    difference = compare_passes(BASE, with_other_bits(BASE, 32 + 7))
    assert (difference.decode, difference.prefill, difference.first) == (1, 0, (1, 7))


def test_what_follows_another_token_is_not_compared() -> None:
    ids = BASE.token_id.copy()
    ids[10] += 1
    other = with_other_bits(replace(BASE, token_id=ids), 20)
    difference = compare_passes(BASE, other)
    assert (difference.decode, difference.shortened, difference.first) == (0, 1, (0, 10))
    assert difference.tokens == 128 - 22
    assert not difference.equal


def test_repeats_without_a_difference_bound_the_rate_of_a_race() -> None:
    outcome = read_repeats(BASE, [BASE] * 5, [True] * 5)
    assert outcome.outcome == "same_bits"
    assert outcome.values["flip_rate_below"] == pytest.approx(1 - 0.05 ** (1 / 5))
    assert "45%" in outcome.text


@pytest.mark.parametrize(("repeats", "bound"), [(0, 1.0), (1, 0.95), (59, 0.0495)])
def test_the_bound(repeats: int, bound: float) -> None:
    assert flip_rate_bound(repeats) == pytest.approx(bound, rel=0.01)


def test_a_repeat_with_other_bits_in_equal_batches_is_a_race() -> None:
    outcome = read_repeats(BASE, [BASE, with_other_bits(BASE, 3)], [True, True])
    assert (outcome.outcome, outcome.values["differing"]) == ("differs", 1)


def test_other_batches_are_not_compared() -> None:
    outcome = read_repeats(BASE, [with_other_bits(BASE, 3)], [False])
    assert outcome.outcome == "not_comparable"


def test_other_cached_tokens_are_another_experiment() -> None:
    other = replace(BASE, cached_generation=BASE.cached_generation + 1)
    assert not same_prompts(BASE, other)
    assert read_repeats(BASE, [other], [True]).outcome == "not_comparable"


def toggle(changed, in_force, *, equally: bool = True):
    return read_toggle(
        "page_size",
        BASE,
        changed,
        setting="--page-size 16",
        asked={"page_size": 16},
        in_force=in_force,
        composed_equally=equally,
    )


def test_a_flag_that_changed_nothing_concludes_nothing() -> None:
    outcome = toggle(BASE, {"page_size": 1})
    assert outcome.outcome == "no_effect"
    assert "page_size is 1" in outcome.text
    assert "nothing was tested" in meaning(outcome)


def test_equal_bits_under_a_change_that_took_effect() -> None:
    outcome = toggle(BASE, {"page_size": 16})
    assert outcome.outcome == "same_bits"
    assert meaning(outcome) == CATALOGUE["page_size"].outcomes["same_bits"]


def test_a_divergence_that_goes_away_and_one_that_moves() -> None:
    assert toggle(made_run("match", [None] * 4), {"page_size": 16}).outcome == "vanished"
    moved = toggle(made_run("match", [None, 3, 9, None]), {"page_size": 16})
    assert (moved.outcome, moved.values["divergent_after"]) == ("moved", 2)


def test_what_comes_or_goes_with_other_batches_may_be_their_row_counts() -> None:
    clean = made_run("match", [None] * 4)
    gone = toggle(clean, {"page_size": 16}, equally=False)
    assert gone.text == "with --page-size 16 nothing diverges, in batches put together otherwise"
    moved = toggle(made_run("match", [None, 3, 9, None]), {"page_size": 16}, equally=False)
    assert moved.text.endswith("of them the same, in batches put together otherwise")
    for outcome in (gone, moved):
        assert meaning(outcome).endswith("or the row counts of the batches, which changed with it")
    assert "row counts" not in meaning(toggle(clean, {"page_size": 16}))


def test_a_divergence_that_only_the_change_brings_is_told_without_one_before() -> None:
    outcome = read_toggle(
        "graphs",
        made_run("match", [None] * 4),
        made_run("match", [None, 3, 9, None]),
        setting="CUDA graphs on",
        asked={"cuda_graphs": True},
        in_force={"cuda_graphs": True},
        composed_equally=True,
    )
    assert outcome.outcome == "moved"
    assert outcome.text == "with CUDA graphs on 2 requests diverge, otherwise none"


def test_other_bits_in_other_batches_decide_nothing() -> None:
    changed = with_other_bits(BASE, 32 + 20)
    assert toggle(changed, {"page_size": 16}, equally=False).outcome == "not_comparable"
    assert toggle(changed, {"page_size": 16}).outcome == "differs"


def test_a_plan_starts_each_configuration_once_and_costs_what_was_measured() -> None:
    plan = make_plan(
        ["page_size", "repeats", "overlap", "alone"], SERVER, helper="match", launch_s=40.0, pass_s=10.0
    )
    names = [(step.experiment, step.configuration.name) for step in plan.steps]
    assert names[:2] == [("repeats", "as it is"), ("alone", "as it is")]
    assert plan.launches == 3
    assert len({name for _, name in names}) == 4
    assert plan.estimate_s == 3 * 40 + (5 + 1 + 2 + 1) * 10
    assert make_plan(["overlap"], SERVER).estimate_s is None


def test_what_is_not_possible_says_why() -> None:
    cpu = {**SERVER, "device": "cpu"}
    assert "CUDA graphs" in (why_not("graphs", cpu) or "")
    assert "one rank" in (why_not("tp", cpu) or "")
    assert "radix cache" in (why_not("equal_m", {**SERVER, "radix_cache": False}) or "")
    assert "1 mod 16" in (why_not("equal_m", {**SERVER, "page_size": 16}) or "")
    plan = make_plan(["graphs", "repeats"], cpu)
    assert list(plan.impossible) == ["graphs"]
    assert {step.experiment for step in plan.steps} == {"repeats"}


def test_every_experiment_has_a_cost_and_its_relaunches_have_configurations() -> None:
    for name, experiment in CATALOGUE.items():
        if why_not(name, SERVER) is None:
            assert cost(name, SERVER)["passes"] >= 1
            assert bool(configurations(name, SERVER)) == experiment.relaunches, name
