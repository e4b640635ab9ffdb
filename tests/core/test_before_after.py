"""The same prompts measured twice: a token is fixed, introduced, remaining, unchanged or not compared."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klbench.core.before_after import compare_columns
from klbench.core.kl import divergent
from tests.core.made_columns import make_columns


def measured(decode, prefill, ids=None, **more):
    columns = make_columns(prompt_len=[4] * len(decode), decode=decode, prefill=prefill, **more)
    tokens = [token for part in ids or [range(len(part)) for part in decode] for token in part]
    return dataclasses.replace(columns, token_id=np.array(tokens, dtype=np.int32))


def test_the_same_measurement_twice_does_not_differ():
    one = measured([[-1.0, -2.0]], [[-1.0, -2.5]])
    change = compare_columns(one, one)
    assert not change.differs
    assert (change.compared, change.remaining, change.fixed, change.introduced) == (2, 1, 0, 0)


def test_a_divergence_that_went_is_fixed_and_one_that_came_is_introduced():
    before = measured([[-1.0, -2.0, -3.0]], [[-1.5, -2.0, -3.0]])
    after = measured([[-1.0, -2.0, -3.0]], [[-1.0, -2.0, -3.5]])
    change = compare_columns(before, after)
    assert (change.fixed, change.introduced, change.remaining) == (1, 1, 0)
    assert (change.decode_changed, change.prefill_changed) == (0, 2)
    assert change.max_abs_prefill_change == 0.5
    (request,) = change.changed_requests
    assert (request.index, request.first_changed, request.parted_at) == (0, 0, None)


def test_both_arms_may_move_together_without_any_divergence():
    change = compare_columns(measured([[-1.0]], [[-1.0]]), measured([[-2.0]], [[-2.0]]))
    assert (change.fixed, change.introduced) == (0, 0)
    assert change.differs


def test_behind_the_first_other_token_nothing_is_compared():
    before = measured([[-1.0, -2.0, -3.0]], [[-1.0, -2.0, -3.0]], ids=[[7, 8, 9]])
    after = measured([[-1.0, -2.0, -9.0]], [[-1.0, -2.0, -3.0]], ids=[[7, 5, 9]])
    change = compare_columns(before, after)
    assert (change.compared, change.not_compared, change.introduced) == (1, 2, 0)
    assert change.changed_requests[0].parted_at == 1
    assert change.differs


def test_a_request_that_one_side_dropped_is_counted_and_not_compared():
    before = measured([[-1.0], []], [[-1.0], []], dropped=[False, True])
    after = measured([[-1.0], [-2.0]], [[-1.0], [-2.5]], dropped=[False, False])
    change = compare_columns(before, after)
    assert (change.dropped, change.requests_compared, change.compared, change.not_compared) == (1, 1, 1, 1)
    assert change.differs


def test_other_prompts_are_never_compared():
    before = measured([[-1.0]], [[-1.0]])
    after = dataclasses.replace(before, prompt_ids=before.prompt_ids + 1)
    change = compare_columns(before, after)
    assert (change.other_prompts, change.compared) == (1, 0)
    assert change.differs


def test_other_helpers_cannot_be_compared():
    one = measured([[-1.0]], [[-1.0]])
    with pytest.raises(ValueError, match="not the same helper"):
        compare_columns(one, dataclasses.replace(one, helper="decode_cache_hit"))


values = st.sampled_from([-1.0, -2.0, float("nan"), float("-inf")])


@given(st.lists(st.tuples(values, values, values, values), max_size=12))
def test_every_compared_token_is_counted_once(tokens):
    columns = [[token[index] for token in tokens] for index in range(4)]
    before, after = measured([columns[0]], [columns[1]]), measured([columns[2]], [columns[3]])
    change = compare_columns(before, after)
    was, now = divergent(before), divergent(after)
    assert change.fixed + change.remaining == np.count_nonzero(was)
    assert change.introduced + change.remaining == np.count_nonzero(now)
    assert change.compared == len(tokens)
