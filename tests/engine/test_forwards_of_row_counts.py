"""Which forwards are made to see whether the number of rows matters, and of which tokens."""

import pytest

from klbench.engine.row_counts import rows_to_try, sequences_of

OWN = list(range(10, 20))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("rows", [3, 4, 10, 20, 21, 41, 100])
@pytest.mark.parametrize("longest", [10, 20])
def test_each_forward_has_its_rows_and_begins_with_the_same_ones(rows, longest, reverse):
    sequences = sequences_of(OWN, 3, rows, longest, reverse=reverse)

    assert sum(map(len, sequences)) == rows
    assert sequences[0][:3] == OWN[:3]
    assert all(2 <= len(sequence) <= longest for sequence in sequences)


def test_no_more_rows_are_captured_than_needed_however_many_share_the_forward():
    sequences = sequences_of(OWN, 300, 2000, 900, reverse=False)

    assert [len(sequence) for sequence in sequences] == [300, 900, 800]
    assert [len(sequence) for sequence in sequences_of(OWN, 3, 2000, 900, reverse=True)] == [256, 900, 844]


def test_two_contents_differ_right_behind_the_common_rows():
    ahead, backwards = (sequences_of(OWN, 3, 8, 20, reverse=reverse)[0] for reverse in (False, True))

    assert ahead[3] != backwards[3]


def test_the_row_counts_of_both_arms_are_tried_and_powers_of_two_between_them():
    assert rows_to_try((4, 640)) == (4, [4, 8, 16, 32, 64, 128, 256, 512, 640])
    assert rows_to_try((640, 1))[0] == 1
    # Nothing is known of the arms: as replays do.
    assert rows_to_try(()) == (1, [1, 2, 3, 4, 8, 16, 32, 64, 128, 256])
    assert rows_to_try((2, 1 << 20))[1][-1] == 8192
