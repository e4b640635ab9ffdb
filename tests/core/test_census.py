"""The census: where an operator changes, how bad that is, and which M are tried."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klbench.core.census import (
    Damage,
    OperatorReplay,
    by_damage,
    census_body,
    joined_variants,
    largest_prime,
    row_counts,
)

REPLAY = OperatorReplay(
    module="model.layers.3.mlp.down_proj",
    call=0,
    class_name="RowParallelLinear",
    order=7,
    rank=0,
    status="invariant",
    reason="",
    total=61,
    tried=(1, 2, 8, 61),
    judged=(0, 30),
    variants=((0, 0, 0, 0), (0, 0, 0, 0)),
)
DAMAGE = Damage(ulp_max=2, differing=5, elements=128, not_numbers=0, pattern="scattered", argument="0")


def changed(*variants, ulps=2, **more):
    return replace(
        REPLAY, status="not_invariant", variants=variants, damage=replace(DAMAGE, ulp_max=ulps), **more
    )


def test_an_operator_changes_where_any_judged_row_first_has_other_bits():
    operator = changed((0, 0, 0, 1), (0, 0, 1, 0))
    assert operator.changed == (8, 61)
    assert operator.first_changed == 8
    assert operator.layer == 3


def test_an_invariant_operator_changes_nowhere():
    assert REPLAY.first_changed is None
    assert REPLAY.changed == ()


def test_the_worst_comes_first_and_what_was_not_judged_is_not_among_the_invariant():
    bad, worse = changed((0, 1, 1, 1), ulps=1), changed((0, 0, 0, 1), ulps=9, order=8)
    nan = changed((0, 0, 0, 1), ulps=0, order=9)
    nan = replace(nan, damage=replace(DAMAGE, not_numbers=1, ulp_max=0))
    skipped = replace(REPLAY, status="skipped", reason="no rows", order=1)
    assert by_damage([REPLAY, skipped, bad, worse, nan]) == [nan, worse, bad, skipped, REPLAY]


def test_the_body_counts_every_status_and_names_all_row_counts():
    body = census_body([REPLAY, changed((0, 1, 1, 1))])
    assert body["summary"] == {
        "not_invariant": 1,
        "not_repeatable": 0,
        "error": 0,
        "skipped": 0,
        "invariant": 1,
        "stateful": 0,
    }
    assert body["rows"] == 61
    assert body["tried_M"] == [1, 2, 8, 61]
    assert body["operators"][0] | {"module": ""} == {
        "module": "",
        "call": 0,
        "layer": 3,
        "class": "RowParallelLinear",
        "rank": 0,
        "status": "not_invariant",
        "reason": None,
        "first_M": 2,
        "changed_M": [2, 8, 61],
        "tried_M": [1, 2, 8, 61],
        "judged_rows": [0, 30],
        "ulp_max": 2,
        "differing": 5,
        "elements": 128,
        "not_numbers": 0,
        "pattern": "scattered",
        "argument": "0",
    }


def test_a_row_is_equal_only_where_all_its_outputs_are():
    assert joined_variants([[[0, 0, 1, 0]], [[0, 1, 0, 0]]]) == ((0, 1, 2, 0),)


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=4))
def test_joined_variants_are_equal_if_and_only_if_every_output_is(outputs):
    (joined,) = joined_variants([[output] for output in outputs])
    for a in range(4):
        for b in range(4):
            assert (joined[a] == joined[b]) == all(output[a] == output[b] for output in outputs)
    assert joined[0] == 0


@pytest.mark.parametrize(
    ("limit", "counts"),
    [(1, [1]), (3, [1, 2, 3]), (64, [1, 2, 3, 4, 8, 16, 32, 64]), (100, [1, 2, 3, 4, 8, 16, 32, 64])],
)
def test_row_counts_are_1_2_3_and_the_powers_of_two(limit, counts):
    assert row_counts(limit) == counts


@given(st.integers(2, 3000))
def test_the_largest_prime_is_prime_and_there_is_none_above_it(limit):
    def is_prime(number):
        return number > 1 and all(number % divisor for divisor in range(2, number))

    found = largest_prime(limit)
    assert is_prime(found)
    assert not any(is_prime(number) for number in range(found + 1, limit + 1))
