"""Cores are shared out among the ranks of a CPU server."""

import pytest

from klbench.engine.cpu_ranks import VARIABLE, rank_cores


@pytest.mark.parametrize(
    ("users", "cores", "expected"),
    [
        ({"--tp-size": "2"}, [0, 1], "0|1"),
        ({"--tp": "2"}, [4, 5, 6, 7], "4,5|6,7"),
        ({"--tensor-parallel-size": "2", "--dp-size": "2"}, [0, 1, 2, 3], "0|1|2|3"),
        # More ranks than cores: they share.
        ({"--tp-size": "4"}, [0, 1], "0|1|0|1"),
    ],
)
def test_each_rank_gets_cores_of_its_own(
    users: dict[str, str | None], cores: list[int], expected: str
) -> None:
    assert rank_cores(users, {}, cores) == {VARIABLE: expected}


@pytest.mark.parametrize("users", [{}, {"--tp-size": "1"}, {"--tp-size": "two"}, {"--tp-size": None}])
def test_one_rank_is_left_alone(users: dict[str, str | None]) -> None:
    assert rank_cores(users, {}, [0, 1]) == {}


def test_the_users_own_choice_stands() -> None:
    assert rank_cores({"--tp-size": "2"}, {VARIABLE: "0-1|0-1"}, [0, 1]) == {}
