"""State by pool slot: what was written, what was read, and by whom; for back ends that observe it.

The writer of a slot is the last write to it before the read, whichever request wrote it. Within one arm a
read that is not what was written is a wrong restore (eviction, overwrite, wrong slot). Only where both arms
read what they wrote are the writes compared: other bits from equal inputs are a wrong write, from other ones
they are inherited.

A read stands for later ones: a back end writes down what a request reads of a slot when it first reads it,
and again only when that has changed. So a read holds until the next one of the same slot in the same arm,
whether or not the row that made it came out different.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from klbench.core.comparison import Comparison, Pairs, Status, Statuses
from klbench.core.history import History, state_columns
from klbench.core.origins import Judged, Mask, Origin
from klbench.core.trace import Arm, Direction, Ints, Slot, Trace


@dataclass(frozen=True, slots=True, eq=False)
class _Reads:
    """Slot reads of one side: entries of the slot table and, for each, its writer (-1: not seen)."""

    entry: Ints
    writer: Ints


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """How long each read of one side holds: from forward number `since` until before `until`, in `arm`."""

    arm: Ints
    position: Ints
    since: Ints
    until: Ints


def state_origins(
    trace: Trace, pairs: Pairs, comparison: Comparison, judged: Judged, history: dict[int, History]
) -> list[Origin]:
    """Origins in the state of every stateful operator whose reads differ behind equal inputs."""
    if not trace.observes_state:
        return []
    found: list[Origin] = []
    for number, seen in history.items():
        victims = (
            (seen.status == Status.DIFFERS)
            & (judged.inputs[number] == Status.EQUAL)
            & (judged.outputs[number] == Status.DIFFERS)
        )
        if victims.any():
            own = comparison.together(state_columns(trace, comparison, number))
            column = int(comparison.columns(number, Direction.OUT)[0])
            found += _origins_of(trace, pairs, number, column, victims, own)
    return found


def _origins_of(
    trace: Trace, pairs: Pairs, operator: int, column: int, victims: Mask, own: Statuses
) -> list[Origin]:
    decode_forwards = np.unique(trace.row_forward[pairs.decode_row])
    scoring_forwards = np.unique(trace.row_forward[pairs.scoring_row])
    decode = _reads(trace, operator, pairs, decode_forwards)
    scoring = _reads(trace, operator, pairs, scoring_forwards)
    held = _held(trace, decode.entry)
    window = trace.operators[operator].window
    read_by_victims = _seen_by(trace, pairs, victims, held, window)
    decode = _Reads(decode.entry[read_by_victims], decode.writer[read_by_victims])
    held = _Held(*(getattr(held, name)[read_by_victims] for name in ("arm", "position", "since", "until")))
    if not len(decode.entry) or not len(scoring.entry):
        return [Origin("not_observed", operator, column, victims)]
    here, there = _matched(trace, decode.entry, scoring.entry)
    other = (trace.slot_digest[decode.entry[here]] != trace.slot_digest[scoring.entry[there]]).any(axis=1)
    here, there = here[other], there[other]
    entry, writer = decode.entry[here], decode.writer[here]
    cold, cold_writer = scoring.entry[there], scoring.writer[there]
    wrong_here = (writer >= 0) & (trace.slot_digest[entry] != trace.slot_digest[writer]).any(axis=1)
    wrong_there = (cold_writer >= 0) & (trace.slot_digest[cold] != trace.slot_digest[cold_writer]).any(axis=1)
    unknown = ((writer < 0) | (cold_writer < 0)) & ~wrong_here & ~wrong_there
    written = ~wrong_here & ~wrong_there & ~unknown
    position = trace.slot_position[entry]
    held = _Held(held.arm[here], held.position[here], held.since[here], held.until[here])
    number = trace.forward_number[trace.row_forward[pairs.decode_row]]
    found: list[Origin] = []
    for arm, wrong in ((Arm.GENERATION, wrong_here), (Arm.SCORING, wrong_there)):
        for at in np.unique(position[wrong]).tolist():
            reading = np.zeros(len(pairs), dtype=np.bool_)
            for place in np.flatnonzero(wrong & (position == at)).tolist():
                holds = (number >= held.since[place]) & (number < held.until[place])
                reading |= holds & (pairs.arm == held.arm[place])
            rows = victims & reading & (pairs.position >= at)
            if window is not None:
                rows &= pairs.position <= at + window
            if rows.any():
                found.append(
                    Origin("state_restore", operator, column, rows, state_position=at, state_arm=arm)
                )
    if written.any():
        writers = _writing_rows(trace, pairs, writer[written]) & (own == Status.EQUAL)
        if writers.any():
            first = int(pairs.position[writers].min())
            found.append(Origin("state_write", operator, column, writers, state_position=first))
    if unknown.any() and not found:
        found.append(
            Origin("not_observed", operator, column, victims, state_position=int(position[unknown].min()))
        )
    return found


def _held(trace: Trace, entries: Ints) -> _Held:
    """How long each of the slot reads `entries` holds."""
    arm_of_forward = np.zeros(len(trace.forward_number), dtype=np.int64)
    arm_of_forward[trace.row_forward] = trace.row_arm
    arm = arm_of_forward[trace.slot_forward[entries]]
    position, argument = trace.slot_position[entries], trace.slot_argument[entries]
    since = trace.forward_number[trace.slot_forward[entries]]
    order = np.lexsort((since, position, argument, arm))
    here, after = order[:-1], order[1:]
    same = (arm[here] == arm[after]) & (argument[here] == argument[after])
    same &= position[here] == position[after]
    until = np.full(len(entries), np.iinfo(np.int64).max)
    until[here[same]] = since[after[same]]
    return _Held(arm, position, since, until)


def _seen_by(trace: Trace, pairs: Pairs, victims: Mask, held: _Held, window: int | None) -> Mask:
    """Which reads some victim made: it runs while the read holds, and its position has the slot in reach."""
    seen = np.zeros(len(held.position), dtype=np.bool_)
    number = trace.forward_number[trace.row_forward[pairs.decode_row]]
    for arm in np.unique(pairs.arm[victims]).tolist():
        mine = np.flatnonzero(victims & (pairs.arm == arm))
        # Within an arm positions grow with time, but for rows that are computed again.
        mine = mine[np.lexsort((pairs.position[mine], number[mine]))]
        position = np.maximum.accumulate(pairs.position[mine])
        first = np.searchsorted(number[mine], held.since)
        end = np.searchsorted(number[mine], held.until)
        first = np.maximum(first, np.searchsorted(position, held.position))
        found = (first < end) & (held.arm == arm)
        if window is not None:
            found &= position[np.minimum(first, len(mine) - 1)] <= held.position + window
        seen |= found
    return seen


def _writing_rows(trace: Trace, pairs: Pairs, entries: Ints) -> Mask:
    """The paired rows that made these slot writes; a write of another request is no row of ours."""
    span = int(trace.slot_position.max()) + 1
    ours = entries[trace.slot_request[entries] == pairs.request]
    written = trace.slot_forward[ours] * span + trace.slot_position[ours]
    mask: Mask = np.isin(trace.row_forward[pairs.decode_row] * span + pairs.position, written)
    return mask


def _reads(trace: Trace, operator: int, pairs: Pairs, forwards: Ints) -> _Reads:
    """The request's slot reads of one operator in the given forwards, each with its writer."""
    mine = np.flatnonzero(
        (trace.slot_operator == operator) & (trace.forward_rank[trace.slot_forward] == pairs.rank)
    )
    number = trace.forward_number[trace.slot_forward[mine]]
    in_slot = np.lexsort(
        (
            trace.slot_kind[mine] == Slot.READ,
            trace.slot_event[mine],
            number,
            trace.slot_pool[mine],
            trace.slot_argument[mine],
        )
    )
    mine = mine[in_slot]
    places = np.arange(len(mine))
    written = trace.slot_kind[mine] == Slot.WRITTEN
    latest = np.maximum.accumulate(np.where(written, places, -1))
    same_slot = (latest >= 0) & (trace.slot_pool[mine[latest]] == trace.slot_pool[mine])
    same_slot &= trace.slot_argument[mine[latest]] == trace.slot_argument[mine]
    writer = np.where(same_slot, mine[latest], -1)
    chosen = (
        ~written & (trace.slot_request[mine] == pairs.request) & np.isin(trace.slot_forward[mine], forwards)
    )
    return _Reads(mine[chosen], writer[chosen])


def _matched(trace: Trace, decode: Ints, scoring: Ints) -> tuple[Ints, Ints]:
    """Pairs of places (into `decode`, into `scoring`) that read the same argument at the same position."""
    span = int(max(trace.slot_position[decode].max(), trace.slot_position[scoring].max())) + 1
    wanted = trace.slot_argument[decode] * span + trace.slot_position[decode]
    there = trace.slot_argument[scoring] * span + trace.slot_position[scoring]
    keys, first = np.unique(there, return_index=True)
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    known = keys[place] == wanted
    return np.flatnonzero(known), first[place[known]]
