"""The equal-M arm of one operator: the same row as decode and as a one-token extend, alone on the server.

    fact = await try_equal_m(side, work, finding, folder=folder)

Both forwards have one row over the same cached prefix, so neither the row count nor another row (condition 1)
can make them differ; what still does is what decode computes otherwise than an extend (condition 2), or for
an operator that reads state two kernels that round in their own way. The rows are checked in a trace: the
operator's inputs and the state that it read must be equal. An extend has one row only where the cache holds
all tokens but the last: it holds whole pages, and of a recurrent state what stood at a whole interval or at a
sequence's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
from pathlib import Path
from typing import Any

from klbench.core.alignment import align
from klbench.core.comparison import Status
from klbench.core.findings import Evidence, Finding
from klbench.core.history import histories
from klbench.core.text import counted
from klbench.core.trace import Arm, Direction, Trace
from klbench.engine.captured_work import ServerSide, Work
from klbench.engine.traces import read_trace
from klbench.engine.ulp_rows import number_of
from klbench.errors import KlbenchError, UndecidedError

CODE = "equal_m"
MEANS = {
    ("same_bits", True): "the same bits. Decode computes the same function there: the row count matters.",
    ("same_bits", False): "the same bits. What differs in the run needs more rows, or other ones beside it.",
    ("differs", True): "other bits. It is not the number of rows: decode and an extend go over the same keys "
    "or state in two ways. Where both are one function that only rounds otherwise, that is condition 1, else "
    "condition 2.",
    ("differs", False): "other bits. It is not the number of rows: decode computes otherwise than an extend.",
}
"""What the comparison says, by its outcome and whether the operator reads state."""
_CAP_BYTES = 1 << 30
_FLOOR_BYTES = 1 << 30


def row_for(work: Work, finding: Finding, page_size: int, interval: int | None = None) -> int | None:
    """The first row, from the finding's on, that decode computed behind whole pages; None without one.

    Where recurrent state is kept each `interval` tokens, one behind a whole interval, too, if there is any:
    elsewhere the state is cached only if a sequence ended there.
    """
    prompt = int(work.measured.prompt_len[work.request])
    last = prompt + int(work.measured.output_len[work.request]) - 2
    first = max(finding.first_position, prompt)
    for size in (math.lcm(page_size, interval or 1), page_size):
        row = -(-first // size) * size
        if row <= last:
            return row
    return None


async def try_equal_m(side: ServerSide, work: Work, finding: Finding, *, folder: Path) -> Evidence:
    """What the equal-M arm says of the operator in `finding`; `folder` is made and removed.

    Where it cannot be made, the evidence says so. Flushes the server's cache.
    """
    row = row_for(work, finding, side.page_size, side.checkpoint_interval)
    if row is None:
        if side.page_size == 1:
            return _not_possible(
                "decode computed no row from the finding's on; more generated tokens allow it"
            )
        return _not_possible(
            f"no generated row stands behind whole pages of {side.page_size} tokens; --page-size 1 allows it "
            "at every row, more generated tokens at some"
        )
    await asyncio.to_thread(folder.mkdir, 0o700)
    try:
        cached = await _both(side, work, row, folder)
        if cached != row:
            return _not_possible(
                f"{cached} of the {row} tokens before row {row} came from the cache, so the extend had "
                f"{counted(row + 1 - cached, 'row')} ({_what_is_kept(side)})"
            )
        trace = await asyncio.to_thread(read_trace, folder)
        return _read(trace, work.request, finding, row)
    except KlbenchError as error:
        return _not_possible(": ".join(part for part in (error.what, error.why) if part))
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, True)


def _what_is_kept(side: ServerSide) -> str:
    """Why the cache may not hold all tokens before a row, and what would help."""
    kept = f"page size {side.page_size}"
    if side.checkpoint_interval:
        kept += (
            f", recurrent state each {counted(side.checkpoint_interval, 'token')} or where a sequence ended"
        )
    return kept if side.page_size == 1 else f"{kept}; --page-size 1 allows it likeliest"


async def _both(side: ServerSide, work: Work, row: int, folder: Path) -> int:
    """Decodes up to `row` and extends by it, captured; returns how many tokens the extend found cached."""
    prompt = work.measured.prompt_of(work.request).tolist()
    options = side.options
    more: dict[str, Any] = {
        "return_logprob": True,
        "routed_dp_rank": options.routed_dp_rank if options is not None else None,
    }

    async def extended(sequence: list[int], rid: str) -> int:
        (answer,) = await side.client.generate([sequence], max_new_tokens=1, rids=[rid], **more)
        return answer.cached_tokens or 0

    await side.client.flush()
    await side.control.open(
        folder, backend="digest", free_floor_bytes=_FLOOR_BYTES, size_cap_bytes=_CAP_BYTES
    )
    rids = side.ids.next_pass({work.request})
    try:
        (answer,) = await side.client.generate(
            [prompt],
            max_new_tokens=row - len(prompt) + 2,
            rids=[rids("generation", work.request)],
            **more,
        )
        sequence = prompt + answer.output_ids[: row - len(prompt) + 1]
        if len(sequence) != row + 1:
            raise UndecidedError(f"alone, request {work.request} generated too few tokens")
        cached = await extended(sequence, rids("scoring", work.request))
        if cached != row:
            # A recurrent state is kept where a sequence ended: one that ends just before the row.
            await side.client.flush()
            again = side.ids.next_pass()("generation", work.request)
            (answer,) = await side.client.generate(
                [prompt], max_new_tokens=row - len(prompt) + 1, rids=[again], **more
            )
            if prompt + answer.output_ids != sequence:
                raise UndecidedError(f"alone, request {work.request} did not generate the same tokens again")
            cached = await extended(sequence, side.ids.next_pass({work.request})("scoring", work.request))
    finally:
        with contextlib.suppress(KlbenchError):
            await asyncio.shield(side.control.close())
    if (reason := side.control.invalid(folder)) is not None:
        raise UndecidedError("the capture was cut", why=reason)
    return cached


def _read(trace: Trace, request: int, finding: Finding, row: int) -> Evidence:
    # An overlap scheduler decodes one row more, of a token that only its own arm generated.
    alignment = align(trace, request, finding.rank, dict.fromkeys(Arm, row))
    if not alignment.proved:
        return _not_possible(alignment.reason or "the rows could not be paired")
    pairs, comparison = alignment.pairs, alignment.comparison
    nodes = [node for node in range(len(pairs)) if pairs.position[node] == row]
    number = number_of(trace, finding.module, finding.call)
    if not nodes or number is None:
        return _not_possible(f"row {row} of {finding.module} was not captured in both forwards")
    node = nodes[0]
    decode_m, extend_m = (
        int(trace.forward_rows[trace.row_forward[rows[node]]])
        for rows in (pairs.decode_row, pairs.scoring_row)
    )
    values = {"row": row, "decode_M": decode_m, "extend_M": extend_m}
    if decode_m != extend_m:
        return _not_possible(
            f"the decode had {counted(decode_m, 'row')}, the extend {extend_m}: other requests ran", values
        )
    stateful = trace.operators[number].state is not None
    history = histories(trace, pairs, comparison).get(number)
    inputs = int(comparison.together(comparison.columns(number, Direction.IN))[node])
    output = int(comparison.together(comparison.columns(number, Direction.OUT))[node])
    state_equal = not stateful or (history is not None and history.status[node] == Status.EQUAL)
    if inputs != Status.EQUAL or not state_equal:
        what = "inputs" if inputs != Status.EQUAL else "state"
        return _not_possible(f"at row {row} its {what} are not proved equal in both forwards", values)
    if output not in (Status.EQUAL, Status.DIFFERS):
        return _not_possible(f"at row {row} its output was not captured in both forwards", values)
    said = (
        f"Row {row} as decode and as a one-token extend on the same cached prefix, both with {decode_m} row"
    )
    values |= {"stateful": stateful}
    outcome = "same_bits" if output == Status.EQUAL else "differs"
    return Evidence(CODE, f"{said}: {MEANS[outcome, stateful]}", {**values, "outcome": outcome})


def _not_possible(why: str, values: dict[str, Any] | None = None) -> Evidence:
    text = f"The same row as decode and as a one-token extend: not possible here: {why}."
    return Evidence(CODE, text, {**(values or {}), "outcome": "not_possible"})
