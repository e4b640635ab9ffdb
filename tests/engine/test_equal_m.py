"""What decode against a one-token extend says: never a condition that its verdict may not have."""

import pytest

from klbench.engine.equal_m import MEANS


@pytest.mark.parametrize("outcome", ["same_bits", "differs"])
def test_of_an_operator_that_reads_state_a_difference_leaves_both_conditions(outcome: str) -> None:
    said = MEANS[outcome, True]
    assert ("condition 1" in said and "condition 2" in said) == (outcome == "differs")
    assert ("the row count matters" in said) == (outcome == "same_bits")


@pytest.mark.parametrize("stateful", [True, False])
def test_what_differs_with_one_row_each_is_not_put_on_their_number(stateful: bool) -> None:
    assert MEANS["differs", stateful].startswith("other bits. It is not the number of rows: decode")
