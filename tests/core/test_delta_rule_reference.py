"""Two gated delta rules that differ: rounded otherwise, or of another state? The inputs themselves tell."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from little_delta_rule import Floats, LittleDeltaRule, bf16, f32

from klbench.core.delta_rule_reference import DeltaRows, judge_delta_rule, recurrence

PROMPT = 230
SLOW = [None, 1.0, 0.02, 0.0005]
"""From heads that forget a row at once to such that remember thousands."""


def decoded(little: LittleDeltaRule, state: Floats | None = None, **changed: Any) -> Floats:
    """What decode puts out behind the prompt's own state, or behind another."""
    return little.step(PROMPT, little.scan(PROMPT)[1] if state is None else state, **changed)


def rows_of(little: LittleDeltaRule, decode: Floats) -> DeltaRows:
    return little.rows(decode, little.scan(len(little))[0], PROMPT)


def judged(little: LittleDeltaRule, decode: Floats) -> tuple[str, str | None]:
    found = judge_delta_rule(rows_of(little, decode), little.rule)
    return found.verdict, found.side


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("bias", [False, True])
def test_the_recurrence_is_what_stepping_in_float64_makes(slow: float | None, bias: bool) -> None:
    little = LittleDeltaRule(1, 150, slow=slow, bias=bias)
    heads = little.heads(lambda x: x)
    # Here what the convolution puts out is rounded as the kernels do; the reference rounds nothing.
    state, outs = little.nothing(), []
    for row in range(len(little)):
        state = state * np.exp(heads.g[row])[:, None, None]
        recalled = np.einsum("hkv,hk->hv", state, heads.k[row])
        delta = heads.beta[row][:, None] * (heads.v[row] - recalled)
        state = state + heads.k[row][:, :, None] * delta[:, None, :]
        outs.append(np.einsum("hkv,hk->hv", state, heads.q[row]) * little.rule.d_k**-0.5)
    nothing = np.zeros((len(little), 4, 32))
    found = recurrence(little.rows(nothing, nothing, 0, len(little)), little.rule)
    assert np.abs(found - np.stack(outs)).max() < 0.02 * np.abs(found).max()


def test_chunks_are_solved_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    little = LittleDeltaRule(2, 150)
    nothing = np.zeros((150, 4, 32))
    rows = little.rows(nothing, nothing, 0, 150)
    whole = recurrence(rows, little.rule)
    for chunk in (1, 7):
        monkeypatch.setattr("klbench.core.delta_rule_reference._CHUNK", chunk)
        assert np.allclose(recurrence(rows, little.rule), whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("kept", [f32, bf16], ids=["float32", "bfloat16"])
def test_a_scan_and_steps_are_rounding_with_a_state_of_either_kind(slow: float | None, kept: Any) -> None:
    little = LittleDeltaRule(3, slow=slow)
    assert judged(little, decoded(little, kept=kept)) == ("rounding", None)


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("back", [1, 16, 128])
def test_a_checkpoint_of_earlier_rows_is_another_state(slow: float | None, back: int) -> None:
    little = LittleDeltaRule(4, slow=slow)
    _, stale = little.scan(PROMPT - back)
    assert judged(little, decoded(little, stale)) == ("other_function", "generation")


@pytest.mark.parametrize("slow", SLOW)
def test_the_state_of_another_request_and_none_at_all_are_another_state(slow: float | None) -> None:
    little, other = (LittleDeltaRule(seed, slow=slow) for seed in (5, 6))
    for state in (other.scan(PROMPT)[1], little.nothing()):
        assert judged(little, decoded(little, state)) == ("other_function", "generation")


@pytest.mark.parametrize("slow", SLOW)
def test_a_row_that_was_not_written_and_a_window_that_lacks_a_row_are_another_function(
    slow: float | None,
) -> None:
    little = LittleDeltaRule(7, slow=slow)
    for wrong in (decoded(little, without=[PROMPT + 3]), decoded(little, taps=(1, 2, 3))):
        assert judged(little, wrong) == ("other_function", "generation")


def test_the_arm_that_is_off_is_named() -> None:
    little = LittleDeltaRule(8)
    wrong, right = decoded(little, little.nothing()), decoded(little)
    found = judge_delta_rule(little.rows(right, wrong, PROMPT), little.rule)
    assert (found.verdict, found.side) == ("other_function", "scoring")
    assert "the scoring arm is not the recurrence of its inputs" in found.sentence


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    slow=st.sampled_from(SLOW),
    alike=st.sampled_from([0.0, 0.5, 0.9]),
    scale=st.sampled_from([0.05, 1.0, 20.0]),
    kept=st.sampled_from([f32, bf16]),
    chunk=st.sampled_from([16, 64]),
    between=st.sampled_from([bf16, f32]),
)
def test_what_only_rounds_is_never_another_function(
    seed: int, slow: float | None, alike: float, scale: float, kept: Any, chunk: int, between: Any
) -> None:
    little = LittleDeltaRule(seed, slow=slow, alike=alike, scale=scale)
    scoring, _ = little.scan(len(little), between, chunk)
    decode = little.step(PROMPT, little.scan(PROMPT, between, chunk)[1], kept=kept)
    found = judge_delta_rule(little.rows(decode, scoring, PROMPT), little.rule)
    assert found.verdict != "other_function"
    # What tokens that are nearly alike write is corrected away, and a bfloat16 state's roundings are not.
    if kept is f32 and alike < 0.9:
        assert found.verdict == "rounding"


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    slow=st.sampled_from(SLOW),
    alike=st.sampled_from([0.0, 0.3]),
    fault=st.sampled_from(["stale", "none", "other", "missing", "window"]),
    back=st.integers(1, 128),
)
def test_a_real_fault_is_never_rounding(
    seed: int, slow: float | None, alike: float, fault: str, back: int
) -> None:
    little = LittleDeltaRule(seed, slow=slow, alike=alike)
    match fault:
        case "stale":
            wrong = decoded(little, little.scan(PROMPT - back)[1])
        case "none":
            wrong = decoded(little, little.nothing())
        case "other":
            wrong = decoded(little, LittleDeltaRule(seed + 1, slow=slow, alike=alike).scan(PROMPT)[1])
        case "missing":
            wrong = decoded(little, without=[PROMPT + back % 8])
        case _:
            wrong = decoded(little, taps=(1, 2, 3))
    assert judged(little, wrong)[0] in ("other_function", "unknown")


def test_an_operator_that_does_more_than_this_is_not_judged() -> None:
    little = LittleDeltaRule(9)
    decode, (scoring, _) = decoded(little), little.scan(len(little))
    found = judge_delta_rule(little.rows(2.0 * decode, 2.0 * scoring, PROMPT), little.rule)
    assert found.verdict == "unknown"
    assert found.sentence.startswith("neither arm")


@pytest.mark.parametrize(("count", "verdict"), [(2, "unknown"), (3, "rounding")])
def test_two_rows_are_not_enough(count: int, verdict: str) -> None:
    little = LittleDeltaRule(10)
    rows = little.rows(decoded(little), little.scan(len(little))[0], PROMPT, count)
    assert judge_delta_rule(rows, little.rule).verdict == verdict


def test_of_float32_no_more_is_asked_than_tensor_cores_take() -> None:
    little = LittleDeltaRule(12)
    nothing = np.zeros((len(little), 4, 32))
    rows = dataclasses.replace(little.rows(nothing, nothing, PROMPT), mantissa=23)
    exact = recurrence(rows, little.rule)
    noise = np.random.Generator(np.random.PCG64(1)).uniform(-1, 1, exact.shape)
    arms = {"decode_out": exact, "scoring_out": exact * (1 + 2.0**-11 * noise)}
    assert judge_delta_rule(dataclasses.replace(rows, **arms), little.rule).verdict == "rounding"
    # In bfloat16 it would be less than one.
    assert judge_delta_rule(dataclasses.replace(rows, **arms, mantissa=7), little.rule).scoring_u < 0.2


def test_numbers_that_are_none_and_inputs_that_are_nothing_conclude_nothing_false() -> None:
    little = LittleDeltaRule(11)
    rows = rows_of(little, decoded(little))
    mixed = rows.mixed.copy()
    mixed[5] = np.nan
    assert judge_delta_rule(dataclasses.replace(rows, mixed=mixed), little.rule).verdict == "unknown"
    nothing = dataclasses.replace(rows, mixed=np.zeros_like(mixed))
    assert judge_delta_rule(nothing, little.rule).verdict == "unknown"


def test_an_arm_that_may_have_been_given_other_rows_is_not_blamed_for_its_state() -> None:
    little = LittleDeltaRule(13)
    wrong, right = decoded(little, little.nothing()), decoded(little)
    for decode, scoring, verdict in (
        (wrong, right, "unknown"),
        # The rows that are judged by are those of the scoring arm.
        (right, wrong, "other_function"),
        (right, little.scan(len(little))[0], "rounding"),
    ):
        rows = dataclasses.replace(little.rows(decode, scoring, PROMPT), same_inputs=False)
        assert judge_delta_rule(rows, little.rule).verdict == verdict
