"""What a helper's generation arm left: all that its scoring arm needs, so that an interrupted helper goes on.

A cold scoring reads nothing from the cache, so it may follow on another start of the same server; everything
before the scoring has to be repeated whole where the cache is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from klbench.engine.answers import Generated


@dataclass(frozen=True, slots=True, eq=False)
class GenerationArm:
    """The arm's prompts (for decode_cache_hit the second turn's) and the checked answers, one a prompt."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Generated]

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.answers):
            raise ValueError(f"{len(self.answers)} answers to {len(self.prompts)} prompts")


Keep = Callable[[GenerationArm], None]
"""Called once the arm's answers are checked, before the scoring begins."""
