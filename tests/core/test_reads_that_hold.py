"""What a request read of a slot is written down once: it holds for the later rows that read it too."""

import dataclasses

import numpy as np
import pytest
from little_transformer import Model, Plant, run_match

from klbench.core.alignment import align
from klbench.core.localisation import localise
from klbench.core.trace import Arm, Direction, Phase, Slot, Trace

TOKENS = [3 + (5 * place) % 11 for place in range(14)]
PROMPT, AT = 7, 9
ATTENTION = "model.layers.1.attn"


def written_once(trace: Trace) -> Trace:
    """The trace without reads of what the same arm has read of the same slot row before, unchanged."""
    arm = np.zeros(len(trace.forward_number), dtype=np.int64)
    arm[trace.row_forward] = trace.row_arm
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    kept = np.ones(len(trace.slot_kind), dtype=np.bool_)
    for place in np.argsort(trace.slot_forward, kind="stable").tolist():
        if trace.slot_kind[place] == Slot.READ:
            key = (
                int(arm[trace.slot_forward[place]]),
                *(int(c[place]) for c in (trace.slot_operator, trace.slot_position)),
            )
            digest = tuple(trace.slot_digest[place].tolist())
            kept[place] = known.get(key) != digest
            known[key] = digest
    columns = {
        field.name: getattr(trace, field.name)[kept]
        for field in dataclasses.fields(trace)
        if field.name.startswith("slot_")
    }
    return dataclasses.replace(trace, **columns)


def without_difference_at(trace: Trace, position: int) -> Trace:
    """The trace in which attention puts out the same bits at one position all the same."""
    (operator,) = [n for n, o in enumerate(trace.operators) if o.module == ATTENTION]
    places = {}
    for tensor in np.flatnonzero(
        (trace.tensor_operator == operator) & (trace.tensor_direction == Direction.OUT)
    ).tolist():
        start, rows = int(trace.tensor_start[tensor]), int(trace.tensor_rows[tensor])
        for place in range(start, start + rows):
            row = trace.tensor_row[place]
            if trace.row_position[row] == position:
                places[int(trace.row_arm[row])] = place
    digest = trace.digest.copy()
    digest[places[Arm.GENERATION]] = digest[places[Arm.SCORING]]
    return dataclasses.replace(trace, digest=digest)


@pytest.mark.parametrize(
    ("place", "kind", "first"),
    [("write", "state_write", AT), ("restore", "state_restore", AT + 1)],
)
def test_a_state_is_named_though_the_row_that_read_it_first_came_out_equal(
    place: str, kind: str, first: int
) -> None:
    def when(arm: Arm, position: int, phase: Phase) -> bool:
        at_once = phase == Phase.DECODE and arm == Arm.GENERATION
        return at_once and (position == AT if place == "write" else position >= AT)

    model = Model(3, plants=(Plant(1, place, when),), observes_state=True)
    divergent = run_match(model, TOKENS, PROMPT)
    trace = without_difference_at(written_once(model.trace()), AT)

    found = localise(trace, [align(trace, 0)], divergent)

    assert (kind, ATTENTION, first) in [(f.kind, f.module, f.first_position) for f in found.findings]
