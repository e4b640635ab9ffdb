"""A verdict reads the same wherever it stands: status, conditions, grade."""

import pytest

from klbench.core.hypotheses import CONDITIONS
from klbench.core.verdict_words import CONDITION_WORDS, verdict_in_words


def test_each_condition_has_its_words() -> None:
    assert tuple(CONDITION_WORDS) == CONDITIONS


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (
            {"status": "found", "conditions": ["different_function"], "grade": "confirmed"},
            "found: different function (condition 2) · confirmed",
        ),
        (
            {
                "status": "found",
                "conditions": ["batch_invariance", "different_function"],
                "grade": "probable",
            },
            "found: batch invariance (condition 1) and different function (condition 2) · probable",
        ),
        (
            {"status": "found", "conditions": ["batch_invariance", "race"], "grade": "unknown"},
            "found: batch invariance (condition 1) or race · unknown",
        ),
        ({"status": "none", "conditions": [], "grade": "probable"}, "none · probable"),
        ({"status": "undecided", "conditions": [], "grade": "unknown"}, "undecided · unknown"),
        # Of another version, or damaged.
        ({"status": "found", "conditions": ["odd_one"], "grade": "sure"}, "found: odd one · sure"),
        ({"conditions": 3}, "undecided · unknown"),
    ],
)
def test_a_verdict_in_words(verdict: dict[str, object], words: str) -> None:
    assert verdict_in_words(verdict) == words
