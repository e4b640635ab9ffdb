"""Which passes can be compared: those whose forwards held the same rows."""

from typing import Any

import pytest

from klbench.engine.experiments import Pass, composed_equally, most_alike

SPLIT, WHOLE, OTHER = (3, 1), (4,), (2, 2)


def made(*shapes: Any) -> list[Pass]:
    return [Pass(None, shape) for shape in shapes]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shapes", "chosen"),
    [
        ((WHOLE, WHOLE, WHOLE), 0),
        # A run that was made of other batches than all its repeats.
        ((SPLIT, WHOLE, WHOLE), 1),
        ((SPLIT, OTHER, WHOLE), 0),
        ((SPLIT, OTHER, SPLIT), 0),
        ((None, None, WHOLE, WHOLE), 2),
        ((None, None), 0),
    ],
)
def test_repeats_are_compared_with_a_pass_of_the_most_common_batches(
    shapes: tuple[Any, ...], chosen: int
) -> None:
    passes = made(*shapes)
    assert most_alike(passes) is passes[chosen]


def test_what_was_not_observed_equals_nothing() -> None:
    one, other = made(None, None)
    assert not composed_equally(one, other)
