"""The census of a server: every stateless leaf operator of its model replayed on real rows of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klbench.core.census import OperatorReplay, largest_prime, row_counts
from klbench.engine.captured_work import ServerSide
from klbench.engine.replay import Progress, replay
from klbench.errors import UndecidedError

MAX_ROWS = 2048
"""Rows of the longest batch: the head works in chunks of so many."""


async def take_census(
    side: ServerSide,
    prompts: Sequence[Sequence[int]],
    *,
    folder: Path,
    max_rows: int = MAX_ROWS,
    progress: Progress | None = None,
) -> tuple[OperatorReplay, ...]:
    """Replays every operator on the rows of the longest prompt, cut to a prime number of tokens.

    Raises UndecidedError where nothing could be replayed.
    """
    longest = max(prompts, key=len)
    rows = largest_prime(min(len(longest), max_rows))
    found = await replay(
        side, longest[:rows], folder=folder, rows=row_counts(rows), modules=None, progress=progress
    )
    if not any(operator.answered for operator in found):
        reasons = "; ".join(sorted({operator.reason for operator in found if operator.reason})[:5])
        raise UndecidedError("no operator could be replayed", why=reasons or "the model has no modules")
    return found
