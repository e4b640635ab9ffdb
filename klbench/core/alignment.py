"""Pairs rows of the decode side with the cold scoring, and proves each pair or refuses.

The decode side is the warming and the generation arm; a row pairs with the scoring row of the same request
and position. The proof: the token ids are equal, the positions are equal (they are the key), and the
embedding put out the same bits (but for traces of the state alone, which hold no embedding). A decode step, a
restored prefix, a chunk, rows in a mixed batch and rows computed again after a retraction are all just rows
here. Rows that the scheduler computed past a request's end are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from klbench.core.comparison import ABSENT, Comparison, Pairs, Status, compare, is_embedding
from klbench.core.trace import STATE_ONLY, Arm, Direction, Trace


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """What was paired on one rank, with the comparison if the pairing is proved."""

    pairs: Pairs
    comparison: Comparison
    proved: bool
    reason: str | None
    """Why not, or what was left out."""
    beyond_end: int
    """Rows of the decode side past the request's end."""
    unpaired: int
    """Rows of the decode side that scoring did not compute."""

    def as_dict(self) -> dict[str, object]:
        """The `alignment` object of klbench.locate/1."""
        return {"proved": self.proved, "rows": len(self.pairs), "reason": self.reason}


def ranks_of(trace: Trace) -> list[int]:
    return [int(rank) for rank in np.unique(trace.forward_rank)]


def align(
    trace: Trace, request: int, rank: int = 0, last_position: Mapping[Arm, int] | None = None
) -> Alignment:
    """Pairs the rows of `request` on `rank`.

    `last_position` is, for each arm, the last row that the request really needed: a request of P prompt and n
    generated tokens needs rows up to P + n - 2. Later ones are the overlap scheduler's and are left out.
    """
    mine = (trace.row_request == request) & (trace.forward_rank[trace.row_forward] == rank)
    scoring = np.flatnonzero(mine & (trace.row_arm == Arm.SCORING))
    decode = np.flatnonzero(mine & (trace.row_arm != Arm.SCORING))
    limits = np.array([(last_position or {}).get(arm, np.iinfo(np.int64).max) for arm in Arm])
    beyond = trace.row_position[decode] > limits[trace.row_arm[decode]]
    decode = decode[~beyond]
    in_time = np.lexsort((trace.row_in_batch[decode], trace.forward_number[trace.row_forward[decode]]))
    decode = decode[in_time]
    length = int(trace.row_position[mine].max()) + 1 if mine.any() else 0
    row_at = np.full(length, -1, dtype=np.int64)
    by_time = scoring[np.argsort(trace.forward_number[trace.row_forward[scoring]], kind="stable")]
    row_at[trace.row_position[by_time]] = by_time
    partner = row_at[trace.row_position[decode]]
    paired = decode[partner >= 0]
    pairs = Pairs(
        rank=rank,
        request=request,
        decode_row=paired,
        scoring_row=partner[partner >= 0],
        position=trace.row_position[paired],
        arm=trace.row_arm[paired],
        phase=trace.row_phase[paired],
    )
    found = Alignment(
        pairs=pairs,
        comparison=compare(trace, pairs),
        proved=True,
        reason=None,
        beyond_end=int(beyond.sum()),
        unpaired=int((partner < 0).sum()),
    )
    reason = _refusal(trace, found)
    return replace(found, proved=reason is None, reason=reason)


def _refusal(trace: Trace, found: Alignment) -> str | None:
    pairs = found.pairs
    if trace.invalid is not None:
        return f"the capture is not valid: {trace.invalid}"
    if not len(pairs):
        return f"no row of request {pairs.request} was captured in both arms"
    if not (pairs.arm == Arm.GENERATION).any():
        return f"no row of request {pairs.request} was captured in the generation arm"
    other_token = trace.row_token[pairs.decode_row] != trace.row_token[pairs.scoring_row]
    if other_token.any():
        first = int(np.flatnonzero(other_token)[0])
        ids = trace.row_token[pairs.decode_row[first]], trace.row_token[pairs.scoring_row[first]]
        return (
            f"at position {pairs.position[first]} the {Arm(int(pairs.arm[first])).name.lower()} arm consumed "
            f"token {ids[0]} and the scoring arm token {ids[1]}"
        )
    if trace.backend == STATE_ONLY:
        return None
    embedding = [
        column
        for number, operator in enumerate(trace.operators)
        if is_embedding(operator)
        for column in found.comparison.columns(number, Direction.OUT)
    ]
    status = found.comparison.together(np.array(embedding, dtype=np.int64))
    for bad, what in (
        (status == Status.DIFFERS, "the embedding put out other bits"),
        ((status == ABSENT) | (status == Status.UNOBSERVED), "the embedding was not observed in both arms"),
    ):
        if bad.any():
            return f"at position {pairs.position[int(np.flatnonzero(bad)[0])]} {what}"
    return None
