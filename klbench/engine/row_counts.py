"""Has a server compute the same first rows in cold forwards of several row counts (core/row_counts.py).

    fact = await try_row_counts(side, work, finding, folder=folder)

Scoring from the first token on uses no cache. The request's own tokens stand in front, as many as the smaller
of the two arms' forwards had rows; what follows are its own further tokens, or others. Other requests fill up
a forward of more rows than are captured, as they do in the arms.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from klbench.core.census import row_counts
from klbench.core.confirmation import arm_rows
from klbench.core.findings import Evidence, Finding
from klbench.core.row_counts import RowCounts, Site, judge_row_counts, read_rungs, row_counts_evidence
from klbench.engine.captured_work import ServerSide, Work
from klbench.engine.traces import read_trace
from klbench.errors import KlbenchError

_CAP_BYTES = 1 << 30
_FLOOR_BYTES = 1 << 30
_FEWEST_ROWS = 256
"""Tried in any case, as replays do."""
_MOST_ROWS = 8192
_CAPTURED = 256
"""Rows of the captured request in one forward: digests of all operators are written for each."""
_JUDGED = 4
"""Rows that are compared: the last of those that every forward has."""
_OWN, _OTHERS = 0, 1


async def try_row_counts(side: ServerSide, work: Work, finding: Finding, *, folder: Path) -> Evidence:
    """What forwards of other row counts say of the operator or gap in `finding`.

    `folder` is made and removed. Where it cannot be made, the evidence says so.
    """
    module = finding.module
    arms = arm_rows(finding)
    try:
        found = await _tried(side, work, finding, arms, folder)
    except (KlbenchError, ValueError) as error:
        parts = (error.what, error.why) if isinstance(error, KlbenchError) else (str(error),)
        reason = ": ".join(part for part in parts if part)
        found = RowCounts("not_possible", (), (), arms, None, (), reason=reason)
    return row_counts_evidence(found, module)


async def _tried(
    side: ServerSide, work: Work, finding: Finding, arms: tuple[int, ...], folder: Path
) -> RowCounts:
    smallest, counts = rows_to_try(arms)
    await asyncio.to_thread(folder.mkdir, 0o700)
    try:
        contents = await _captured(side, work, smallest, counts, folder)
        trace = await asyncio.to_thread(read_trace, folder)
        if trace.invalid is not None:
            raise ValueError(f"the capture is not valid: {trace.invalid}")
        rungs = read_rungs(
            trace,
            Site.of(finding),
            rank=finding.rank,
            request=0,
            positions=range(max(0, front_of(work, smallest) - _JUDGED), front_of(work, smallest)),
            contents=contents,
        )
        return judge_row_counts(rungs, arms)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, True)


def rows_to_try(arms: Sequence[int]) -> tuple[int, list[int]]:
    """The smallest M, whose rows stand in front of every forward, and all M in order."""
    smallest = min(min(arms, default=1), _MOST_ROWS // 2)
    largest = min(max((*arms, _FEWEST_ROWS)), _MOST_ROWS)
    inside = {m for m in row_counts(largest) if m > smallest}
    return smallest, sorted({smallest, *(m for m in arms if m <= _MOST_ROWS), *inside})


async def _captured(
    side: ServerSide, work: Work, smallest: int, counts: Sequence[int], folder: Path
) -> list[int]:
    """Sends the forwards, captured; returns what stood behind the rows in each, in order."""
    measured = work.measured
    output = measured.token_id[measured.tokens_of(work.request)]
    own = [int(token) for token in (*measured.prompt_of(work.request), *output)]
    front = front_of(work, smallest)
    options = side.options
    await side.client.flush()
    await side.control.open(
        folder, backend="digest", free_floor_bytes=_FLOOR_BYTES, size_cap_bytes=_CAP_BYTES
    )
    contents = []
    try:
        # The smallest once more at the end: a server that does not repeat itself proves nothing.
        for rows, content in [
            (smallest, _OWN),
            *itertools.product([m for m in counts if m != smallest], (_OWN, _OTHERS)),
            (smallest, _OWN),
        ]:
            sequences = sequences_of(own, front, rows, _longest(work), reverse=content == _OTHERS)
            rids = side.ids.next_pass({0})
            more: dict[str, Any] = {"rids": [rids("scoring", index) for index in range(len(sequences))]}
            await side.client.generate(
                sequences,
                max_new_tokens=0,
                return_logprob=True,
                logprob_start_len=0,
                routed_dp_rank=options.routed_dp_rank if options is not None else None,
                **more,
            )
            contents.append(content)
    finally:
        with contextlib.suppress(KlbenchError):
            await asyncio.shield(side.control.close())
    if (reason := side.control.invalid(folder)) is not None:
        raise ValueError(f"the capture was cut: {reason}")
    return contents


def _longest(work: Work) -> int:
    """The longest sequence that the run had: what the server takes."""
    return int((work.measured.prompt_len + work.measured.output_len).max())


def front_of(work: Work, smallest: int) -> int:
    """How many rows of the captured request every forward begins with."""
    return min(smallest, _longest(work), _CAPTURED)


def sequences_of(
    own: Sequence[int], front: int, rows: int, longest: int, *, reverse: bool
) -> list[list[int]]:
    """Sequences of at most `longest` tokens and of `rows` in all; the first begins with `own[:front]`.

    What follows goes on with `own`, again and again, or goes backwards through it. The first has no more
    tokens than are captured, and none has less than two, but for a single one.
    """
    behind = own[::-1] if reverse else [*own[front:], *own[:front]]
    tail: Iterator[int] = itertools.cycle(behind)
    head = [*itertools.islice(itertools.cycle(own), front)]
    lengths: list[int] = []
    left = rows
    while left > 0:
        length = min(left, longest if lengths else min(longest, max(front, _CAPTURED)))
        if left - length == 1 and length > max(front, 2):
            length -= 1
        lengths.append(length)
        left -= length
    first = [*head, *itertools.islice(tail, lengths[0] - front)]
    return [first, *([*itertools.islice(tail, length)] for length in lengths[1:])]
