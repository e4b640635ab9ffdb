"""State by pool slot: what was written, what was read, and by whom; for back ends that observe it.

The writer of a slot is the last write to it before the read, whichever request wrote it; where that request
was not recorded, the writer is not known, and nothing is said of what it wrote. Within one arm a
read that is not what was written is a wrong restore (eviction, overwrite, wrong slot). Only where both arms
read what they wrote are the writes compared: other bits from equal inputs are a wrong write, from other ones
they are inherited.

A read stands for later ones: a back end writes down what a request reads of a slot when it first reads it,
and again only when that has changed. So a read holds until the next one of the same slot in the same arm,
whether or not the row that made it came out different.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.core.comparison import Comparison, Pairs, Status, Statuses
from klbench.core.history import History, state_columns
from klbench.core.origins import Judged, Mask, Origin
from klbench.core.state_rows import StateRows
from klbench.core.trace import ANY_SLOT, Arm, Direction, Ints, Phase, Slot, Trace


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

    def at(self, chosen: npt.NDArray[Any]) -> _Held:
        return _Held(self.arm[chosen], self.position[chosen], self.since[chosen], self.until[chosen])


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
        # A scan reads its slot at the first row of a forward alone: hardly ever in both arms.
        alone = (
            (seen.status == Status.UNOBSERVED)
            & (judged.inputs[number] == Status.EQUAL)
            & (judged.outputs[number] == Status.DIFFERS)
        )
        if trace.operators[number].state != "kv" and alone.any():
            column = int(comparison.columns(number, Direction.OUT)[0])
            wrong = wrong_reads(trace, pairs, number, alone)
            found += [Origin("state_restore", number, column, rows, state=state) for state, rows in wrong]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Compared:
    """Reads of the decode side that are not what scoring read; arrays are [n], places into the slots."""

    entry: Ints
    writer: Ints
    cold: Ints
    cold_writer: Ints
    held: _Held
    cold_held: _Held

    def wrong(self, trace: Trace, arm: Arm) -> Mask:
        """Where `arm` read what was not last written there; GENERATION stands for the decode side."""
        read, writer = (self.cold, self.cold_writer) if arm == Arm.SCORING else (self.entry, self.writer)
        mask: Mask = (writer >= 0) & (trace.slot_digest[read] != trace.slot_digest[writer]).any(axis=1)
        return mask


def _compared(trace: Trace, pairs: Pairs, operator: int, rows: Mask) -> _Compared | None:
    """What `rows` read of an operator's slots and scoring read otherwise; None where one side read none."""
    decode = _reads(trace, operator, pairs, np.unique(trace.row_forward[pairs.decode_row]))
    scoring = _reads(trace, operator, pairs, np.unique(trace.row_forward[pairs.scoring_row]))
    held = _held(trace, decode.entry)
    made = _seen_by(trace, pairs, rows, held, trace.operators[operator].window)
    decode, held = _Reads(decode.entry[made], decode.writer[made]), held.at(made)
    if not len(decode.entry) or not len(scoring.entry):
        return None
    here, there = _matched(trace, decode.entry, scoring.entry)
    other = (trace.slot_digest[decode.entry[here]] != trace.slot_digest[scoring.entry[there]]).any(axis=1)
    here, there = here[other], there[other]
    return _Compared(
        decode.entry[here],
        decode.writer[here],
        scoring.entry[there],
        scoring.writer[there],
        held.at(here),
        _held(trace, scoring.entry).at(there),
    )


def wrong_reads(trace: Trace, pairs: Pairs, operator: int, victims: Mask) -> list[tuple[StateRows, Mask]]:
    """State that was read otherwise than it was last written, each with those of `victims` that read it.

    What the decode side read need not have been read by scoring.
    """
    decode = _reads(trace, operator, pairs, np.unique(trace.row_forward[pairs.decode_row]))
    held = _held(trace, decode.entry)
    made = _seen_by(trace, pairs, victims, held, trace.operators[operator].window)
    entry, writer = decode.entry[made], decode.writer[made]
    always = np.zeros_like(writer)
    cold_held = _Held(always, always, always, np.full_like(writer, np.iinfo(np.int64).max))
    alone = _Compared(entry, writer, entry, np.full_like(writer, -1), held.at(made), cold_held)
    found = _wrong_reads(trace, pairs, operator, victims, alone)
    both = _compared(trace, pairs, operator, victims)
    if both is not None:
        scored = _wrong_reads(trace, pairs, operator, victims, both)
        found += [(state, rows) for state, rows in scored if state.read_in == Arm.SCORING]
    return found


def _wrong_reads(
    trace: Trace, pairs: Pairs, operator: int, victims: Mask, compared: _Compared
) -> list[tuple[StateRows, Mask]]:
    number = trace.forward_number[trace.row_forward[pairs.decode_row]]
    scored = trace.forward_number[trace.row_forward[pairs.scoring_row]]
    window, held, cold_held = trace.operators[operator].window, compared.held, compared.cold_held
    position = trace.slot_position[compared.entry]
    groups: dict[tuple[Arm, bytes], list[int]] = {}
    for arm in (Arm.GENERATION, Arm.SCORING):
        wrong = compared.wrong(trace, arm)
        for at in np.unique(position[wrong]).tolist():
            places = np.flatnonzero(wrong & (position == at))
            reading = np.zeros(len(pairs), dtype=np.bool_)
            for place in places.tolist():
                holds = (number >= held.since[place]) & (number < held.until[place])
                holds &= (scored >= cold_held.since[place]) & (scored < cold_held.until[place])
                reading |= holds & (pairs.arm == held.arm[place])
            rows = victims & reading & (pairs.position >= at)
            if window is not None:
                rows &= pairs.position <= at + window
            if rows.any():
                groups.setdefault((arm, rows.tobytes()), []).extend(places.tolist())
    found = []
    for (arm, rows_bytes), members in groups.items():
        here = np.array(members, dtype=np.int64)
        scoring = arm == Arm.SCORING
        read = (compared.cold if scoring else compared.entry)[here]
        writer = (compared.cold_writer if scoring else compared.writer)[here]
        read_in = Arm.SCORING if scoring else Arm(int(held.arm[here[0]]))
        found.append((_state_rows(trace, read, writer, read_in), np.frombuffer(rows_bytes, dtype=np.bool_)))
    return found


def _wrong_in_scoring_alone(
    trace: Trace, pairs: Pairs, operator: int, victims: Mask
) -> list[tuple[StateRows, Mask]]:
    """What scoring read otherwise than it was last written, where the decode side is not seen to read it.

    Chunks end elsewhere in the two arms: what one of them reads of the pool the other has just computed.
    """
    decode = _reads(trace, operator, pairs, np.unique(trace.row_forward[pairs.decode_row]))
    scoring = _reads(trace, operator, pairs, np.unique(trace.row_forward[pairs.scoring_row]))
    if not len(scoring.entry):
        return []
    made = _seen_by(trace, pairs, victims, _held(trace, decode.entry), trace.operators[operator].window)
    alone = np.ones(len(scoring.entry), dtype=np.bool_)
    if made.any():
        alone[_matched(trace, decode.entry[made], scoring.entry)[1]] = False
    places = np.flatnonzero(alone)
    cold_held = _held(trace, scoring.entry).at(places)
    found = []
    for arm in np.unique(pairs.arm[victims]).tolist():
        entry, writer = scoring.entry[places], scoring.writer[places]
        none = np.zeros_like(entry)
        always = _Held(np.full_like(entry, arm), none, none, np.full_like(entry, np.iinfo(np.int64).max))
        compared = _Compared(entry, none - 1, entry, writer, always, cold_held)
        found += _wrong_reads(trace, pairs, operator, victims, compared)
    return found


def _state_rows(trace: Trace, entries: Ints, writers: Ints, read_in: Arm | None) -> StateRows:
    """What these slot entries are; `writers` wrote them last (-1: not seen)."""
    order = np.argsort(trace.slot_position[entries], kind="stable")
    entries, writer = entries[order], int(writers[order[0]])
    positions, first = np.unique(trace.slot_position[entries], return_index=True)
    arms = trace.row_arm[(trace.row_forward == trace.slot_forward[writer]) & (writer >= 0)]
    return StateRows(
        layer=trace.operators[int(trace.slot_operator[entries[0]])].layer,
        arguments=tuple(sorted({trace.arguments[number] for number in trace.slot_argument[entries]})),
        positions=tuple(int(position) for position in positions),
        slots=tuple(int(slot) for slot in trace.slot_pool[entries[first]]),
        read_in=read_in,
        writer_request=int(trace.slot_request[writer]) if writer >= 0 else None,
        written_in=Arm(int(arms[0])) if len(arms) else None,
    )


def _origins_of(
    trace: Trace, pairs: Pairs, operator: int, column: int, victims: Mask, own: Statuses
) -> list[Origin]:
    compared = _compared(trace, pairs, operator, victims)
    scored = [
        Origin("state_restore", operator, column, rows, state=state)
        for state, rows in _wrong_in_scoring_alone(trace, pairs, operator, victims)
    ]
    if compared is None:
        return scored or [Origin("not_observed", operator, column, victims)]
    wrong = compared.wrong(trace, Arm.GENERATION) | compared.wrong(trace, Arm.SCORING)
    unknown = ((compared.writer < 0) | (compared.cold_writer < 0)) & ~wrong
    found = [
        Origin("state_restore", operator, column, rows, state=state)
        for state, rows in _wrong_reads(trace, pairs, operator, victims, compared)
    ]
    found += scored
    written = compared.writer[~wrong & ~unknown]
    if len(written):
        rows, made = _writing_rows(trace, pairs, written)
        rows &= own == Status.EQUAL
        made = made[np.isin(trace.slot_position[made], pairs.position[rows])]
        if rows.any() and len(made):
            state = _state_rows(trace, made, made, None)
            found.append(Origin("state_write", operator, column, rows, state=state))
    theirs = written[trace.slot_request[written] != pairs.request]
    if len(theirs) and not found:
        state = _state_rows(trace, theirs, theirs, None)
        found.append(Origin("not_observed", operator, column, victims, state=state))
    if unknown.any() and not found:
        first = compared.entry[unknown][:1]
        state = _state_rows(trace, first, np.full_like(first, -1), None)
        found.append(Origin("not_observed", operator, column, victims, state=state))
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


def _writing_rows(trace: Trace, pairs: Pairs, entries: Ints) -> tuple[Mask, Ints]:
    """The paired rows that made these slot writes, and those that they made; others' writes are left out."""
    span = int(trace.slot_position.max()) + 1
    ours = entries[trace.slot_request[entries] == pairs.request]
    written = trace.slot_forward[ours] * span + trace.slot_position[ours]
    paired = trace.row_forward[pairs.decode_row] * span + pairs.position
    return np.isin(paired, written), ours[np.isin(written, paired)]


def _reads(trace: Trace, operator: int, pairs: Pairs, forwards: Ints) -> _Reads:
    """The request's slot reads of one operator in the given forwards, each with its writer.

    Recurrent state is copied from slot to slot (into checkpoints, and out of them for each new owner): what a
    slot ought to hold is what the request itself last wrote at that position, wherever it was then, or what
    any request with the same bits wrote there: a checkpoint may be another's that began alike.
    """
    mine = every = np.flatnonzero(
        (trace.slot_operator == operator) & (trace.forward_rank[trace.slot_forward] == pairs.rank)
    )
    place, in_pool = trace.slot_pool, trace.operators[operator].state == "kv"
    if not in_pool:
        mine, place = mine[trace.slot_request[mine] == pairs.request], trace.slot_position
    number = trace.forward_number[trace.slot_forward[mine]]
    in_slot = np.lexsort(
        (
            trace.slot_kind[mine] == Slot.READ,
            trace.slot_event[mine],
            number,
            place[mine],
            trace.slot_argument[mine],
        )
    )
    mine = mine[in_slot]
    places = np.arange(len(mine))
    written = trace.slot_kind[mine] == Slot.WRITTEN
    latest = np.maximum.accumulate(np.where(written, places, -1))
    same_slot = (latest >= 0) & (place[mine[latest]] == place[mine])
    same_slot &= trace.slot_argument[mine[latest]] == trace.slot_argument[mine]
    writer = np.where(same_slot, mine[latest], -1)
    chosen = (
        ~written & (trace.slot_request[mine] == pairs.request) & np.isin(trace.slot_forward[mine], forwards)
    )
    reads = _Reads(mine[chosen], writer[chosen])
    return _unless_unseen(trace, pairs, operator, reads) if in_pool else _of_equal_bits(trace, every, reads)


def _unless_unseen(trace: Trace, pairs: Pairs, operator: int, reads: _Reads) -> _Reads:
    """The reads, without a writer where a request that is not recorded got the slot after it was written.

    Not so while the request that wrote it still runs: then nobody may have got it, and who did spoilt it.
    """
    noted = trace.unseen_rank == pairs.rank
    own_pool = trace.operators[operator].window is not None and bool(trace.unseen_windowed[noted].any())
    noted &= (trace.unseen_windowed == own_pool) | (trace.unseen_pool == ANY_SLOT)
    seen = reads.writer >= 0
    if not noted.any() or not seen.any():
        return reads
    entry, writer = reads.entry[seen], reads.writer[seen]
    number = trace.forward_number[trace.slot_forward]
    span = int(max(trace.unseen_number[noted].max(), number.max())) + 2
    # One number for a slot and a time; the slots begin behind ANY_SLOT.
    written = np.sort((trace.unseen_pool[noted] - ANY_SLOT) * span + trace.unseen_number[noted])
    lost = np.zeros(len(entry), dtype=np.bool_)
    for slot in (trace.slot_pool[entry], np.full(len(entry), ANY_SLOT)):
        first = (slot - ANY_SLOT) * span
        until = np.searchsorted(written, first + number[entry], side="right")
        lost |= until > np.searchsorted(written, first + number[writer], side="right")
    arm = np.zeros(len(trace.forward_number), dtype=np.int64)
    arm[trace.row_forward] = trace.row_arm
    resumed = trace.row_arm[(trace.row_phase == Phase.RESUMED) & (trace.row_request == pairs.request)]
    reading, writing = arm[trace.slot_forward[entry]], arm[trace.slot_forward[writer]]
    still_runs = (trace.slot_request[writer] == pairs.request) & (reading == writing)
    lost &= ~(still_runs & ~np.isin(reading, resumed))
    known = reads.writer.copy()
    known[np.flatnonzero(seen)[lost]] = -1
    return _Reads(reads.entry, known)


def _of_equal_bits(trace: Trace, every: Ints, reads: _Reads) -> _Reads:
    """The reads, with another writer where that wrote what was read and the request itself did not.

    `every` are all slot entries of the operator.
    """
    digest = trace.slot_digest
    strange = np.flatnonzero((reads.writer < 0) | (digest[reads.entry] != digest[reads.writer]).any(axis=1))
    writes = every[trace.slot_kind[every] == Slot.WRITTEN]
    if not len(strange) or not len(writes):
        return reads
    both = np.concatenate([writes, reads.entry[strange]])
    about = np.stack([trace.slot_argument[both], trace.slot_position[both]], axis=1).astype(np.uint64)
    _, alike = np.unique(np.concatenate([about, digest[both]], axis=1), axis=0, return_inverse=True)
    number = trace.forward_number[trace.slot_forward[both]]
    at = alike.reshape(-1) * (int(number.max()) + 1) + number
    order = np.argsort(at[: len(writes)], kind="stable")
    # The last write before the read's forward: what a forward reads it reads before it writes.
    place = np.searchsorted(at[: len(writes)][order], at[len(writes) :], side="left") - 1
    found = order[np.maximum(place, 0)]
    same = (place >= 0) & (alike.reshape(-1)[found] == alike.reshape(-1)[len(writes) :])
    writer = reads.writer.copy()
    writer[strange[same]] = writes[found[same]]
    return _Reads(reads.entry, writer)


def _matched(trace: Trace, decode: Ints, scoring: Ints) -> tuple[Ints, Ints]:
    """All places (into `decode`, into `scoring`) that read the same argument at the same position."""
    span = int(max(trace.slot_position[decode].max(), trace.slot_position[scoring].max())) + 1
    wanted = trace.slot_argument[decode] * span + trace.slot_position[decode]
    there = trace.slot_argument[scoring] * span + trace.slot_position[scoring]
    order = np.argsort(there, kind="stable")
    first = np.searchsorted(there[order], wanted, side="left")
    count = np.searchsorted(there[order], wanted, side="right") - first
    here = np.repeat(np.arange(len(wanted)), count)
    within = np.arange(len(here)) - np.repeat(np.cumsum(count) - count, count)
    return here, order[first[here] + within]
