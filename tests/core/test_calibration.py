"""A threshold is proposed only from what was measured, and says how often it would be wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klbench.core.calibration import calibration_key, noise_floor, propose, threshold_above

sys.path.insert(0, str(Path(__file__).parent))
from made_columns import made_run
from situations import SERVER

CLEAN = made_run("match", [None] * 4)


def changed(arm: str, size: float):
    nats = getattr(CLEAN, arm).copy()
    nats[5] += np.float32(size)
    return replace(CLEAN, **{arm: nats})


def test_a_path_that_measures_zero_and_repeats_allows_sglangs_gate() -> None:
    proposal = propose([0.0, 0.0, 0.0], noise_floor([CLEAN] * 3), SERVER)
    assert (proposal.threshold_nats, proposal.zero, proposal.false_alarm_rate) == (1e-9, True, 0.0)
    assert proposal.first == ""


@pytest.mark.parametrize(
    ("arm", "named"), [("decode_nats", "the generation arm"), ("prefill_nats", "the scoring arm")]
)
def test_an_arm_that_does_not_repeat_is_named(arm: str, named: str) -> None:
    floor = noise_floor([CLEAN, CLEAN, changed(arm, 0.25)])
    moved = getattr(floor, arm.split("_")[0])
    assert (moved.differing, moved.max_abs_nats) == (1, 0.25)
    assert moved.k3_nats > 0
    proposal = propose([0.0, 0.0, 1e-4], floor, SERVER)
    assert proposal.first.startswith(f"{named} gives other bits")
    assert proposal.threshold_nats == 1.01e-4
    assert proposal.false_alarm_rate == 0.25
    assert "at most once in 4" in proposal.sentence


def test_zero_on_average_but_moving_bits_is_not_zero() -> None:
    moving = propose([0.0, 0.0], noise_floor([CLEAN, changed("decode_nats", 1e-6)]), SERVER)
    assert not moving.zero
    assert moving.first
    assert moving.threshold_nats == 1e-9


def test_a_divergence_that_repeats_is_no_noise() -> None:
    dirty = made_run("match", [1, 1, 1, 1])
    proposal = propose([2e-6, 2e-6], noise_floor([dirty, dirty]), SERVER)
    assert "no noise" in proposal.first
    assert not proposal.zero


def test_passes_that_are_the_same_are_one_observation_and_tell_nothing_about_chance() -> None:
    dirty = made_run("match", [1, 1, 1, 1])
    proposal = propose([2e-6] * 5, noise_floor([dirty] * 5), SERVER)
    assert proposal.threshold_nats == 2.01e-6
    assert proposal.false_alarm_rate is None
    assert "5 passes are the same bit for bit, so they are one observation" in proposal.sentence
    assert "chance" not in proposal.sentence


@given(st.floats(min_value=0, max_value=1e3))
def test_what_was_measured_passes_its_threshold_as_sglang_asks_it(average: float) -> None:
    threshold = threshold_above(average)
    assert average < threshold
    assert threshold == float(f"{threshold:.3g}")
    assert threshold == 1e-9 or threshold - average <= 0.0101 * average


def test_without_deterministic_inference_that_comes_first() -> None:
    dirty = made_run("match", [1, 1, 1, 1])
    server = {**SERVER, "deterministic": False}
    assert "deterministic" in propose([2e-6, 3e-6], noise_floor([dirty, dirty]), server).first


def test_a_floor_by_nature_is_said() -> None:
    dirty = made_run("match", [1, 1, 1, 1])
    server = {**SERVER, "architectures": ["Qwen3NextForCausalLM"]}
    assert "scan" in propose([2e-6, 2e-6], noise_floor([dirty, dirty]), server).first


def test_other_generated_tokens_are_counted_and_not_compared() -> None:
    ids = CLEAN.token_id.copy()
    ids[40] += 1
    floor = noise_floor([CLEAN, replace(CLEAN, token_id=ids)])
    assert (floor.shortened, floor.decode.tokens) == (1, 128 - 24)
    assert not floor.zero


def test_one_pass_allows_nothing() -> None:
    assert propose([0.0], noise_floor([CLEAN]), SERVER).threshold_nats is None


def test_the_key_holds_what_changes_a_floor() -> None:
    assert calibration_key(SERVER) != calibration_key({**SERVER, "dtype": "float16"})
    assert set(calibration_key({})) >= {
        "model",
        "tp_size",
        "dtype",
        "attention_backend",
        "gpus",
        "sglang_version",
    }
