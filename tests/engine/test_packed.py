"""Packed forwards: what is unfolded is what was packed, and contradictions are refused."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klbench.engine.packed import COLUMNS, BadPacking, unfold
from klbench.engine.traces import _unrolled
from klbench.errors import KlbenchError


def columns(**given: list[int]) -> dict[str, np.ndarray]:
    """One forward of 2 rows from row 5 on: rows twice the same piece, a whole tensor, a list of one row."""
    base = {
        "packed_forward": [3],
        "packed_layout": [0],
        "packed_first_row": [5],
        "packed_rows": [2],
        "list_packed": [0],
        "list_group": [2],
        "list_row": [6],
        "layout_number": [0, 0, 0, 0],
        "layout_operator": [7, 8, 9, 9],
        "layout_direction": [1, 0, 0, 1],
        "layout_argument": [0, 0, 1, 0],
        "layout_dtype": [0, 0, 0, 0],
        "layout_row_bytes": [16, 16, 8, 16],
        "layout_event": [0, 1, 1, 2],
        "layout_group": [1, 1, 0, 2],
        "layout_piece": [0, 0, 1, 2],
        "row_forward": [3] * 7,
    } | given
    assert set(base) == {*COLUMNS, "row_forward"}
    return {name: np.array(values, dtype=np.int64) for name, values in base.items()}


def digests(count: int) -> np.ndarray:
    return np.arange(2 * count, dtype=np.uint64).reshape(count, 2)


def test_tensors_of_one_piece_have_its_digests_and_groups_their_rows() -> None:
    found = unfold(columns(), digests(4))

    assert found.columns["tensor_rows"].tolist() == [2, 2, 1, 1]
    assert found.columns["tensor_start"].tolist() == [0, 2, 4, 5]
    assert found.columns["tensor_row"].tolist() == [5, 6, 5, 6, -1, 6]
    assert found.columns["tensor_forward"].tolist() == [3, 3, 3, 3]
    assert found.columns["tensor_operator"].tolist() == [7, 8, 9, 9]
    assert found.digest[:, 0].tolist() == [0, 2, 0, 2, 4, 6]


@pytest.mark.parametrize(
    "broken",
    [
        {"packed_layout": [4]},
        {"packed_rows": [10**12]},
        {"packed_rows": [-1]},
        {"layout_group": [1, 1, 0, 10**9]},
        {"layout_piece": [0, 0, 1, 10**9]},
        {"layout_piece": [0, 0, 0, 2]},
        {"layout_piece": [0, 0, 1, 3]},
        {"list_packed": [1]},
        {"list_group": [1]},
        {"list_group": [10**12]},
    ],
    ids=str,
)
def test_tables_that_contradict_each_other_are_refused(broken: dict[str, list[int]]) -> None:
    with pytest.raises(BadPacking):
        unfold(columns(**broken), digests(4))


@pytest.mark.parametrize("count", [3, 5])
def test_digests_must_be_as_many_as_the_layouts_need(count: int) -> None:
    with pytest.raises(BadPacking):
        unfold(columns(), digests(count))


@given(st.lists(st.integers(-(2**40), 2**40), min_size=0, max_size=40))
def test_steps_of_a_column_give_it_back(values: list[int]) -> None:
    torch = pytest.importorskip("torch")
    from klbench.insitu.trace_writer import _stored

    name, stored = _stored("row", torch.tensor(values, dtype=torch.int64))

    back = stored.numpy() if name == "row" else _unrolled(Path("f"), "row", stored.numpy())
    assert back.tolist() == values


def test_a_column_of_endless_steps_is_refused() -> None:
    with pytest.raises(KlbenchError):
        _unrolled(Path("f"), "row", np.array([[1], [2**62]], dtype=np.int64))
