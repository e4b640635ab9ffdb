"""Chunks end elsewhere in the two arms: a state that only scoring restored wrongly is found all the same."""

import dataclasses

import numpy as np
import pytest
from little_transformer import Model, Plant

from klbench.core.alignment import align
from klbench.core.localisation import localise
from klbench.core.trace import Arm, Phase, Slot, Trace

TOKENS = [3 + (5 * place) % 11 for place in range(14)]
PROMPT, CUT = 9, 5
ATTENTION = "model.layers.1.attn"


def without_what_the_decode_side_read(trace: Trace) -> Trace:
    """The trace of a back end that writes down only reads which are not what was written before."""
    arm = np.zeros(len(trace.forward_number), dtype=np.int64)
    arm[trace.row_forward] = trace.row_arm
    kept = (trace.slot_kind != Slot.READ) | (arm[trace.slot_forward] == Arm.SCORING)
    columns = {
        field.name: getattr(trace, field.name)[kept]
        for field in dataclasses.fields(trace)
        if field.name.startswith("slot_")
    }
    return dataclasses.replace(trace, **columns)


@pytest.mark.parametrize("seen", [True, False])
def test_a_chunk_of_scoring_that_reads_a_wrong_state_is_the_origin(seen: bool) -> None:
    def when(arm: Arm, position: int, phase: Phase) -> bool:
        return arm == Arm.SCORING and phase == Phase.CHUNK and position >= CUT

    model = Model(3, plants=(Plant(1, "restore", when),), observes_state=True)
    model.extend(Arm.GENERATION, TOKENS[:PROMPT], 0, Phase.EXTEND)
    for position in range(PROMPT, len(TOKENS) - 1):
        model.decode(Arm.GENERATION, TOKENS[position], position)
    model.flush()
    model.extend(Arm.SCORING, TOKENS[:CUT], 0, Phase.EXTEND)
    model.extend(Arm.SCORING, TOKENS[CUT:], CUT, Phase.CHUNK)
    divergent = model.divergent_tokens(PROMPT, len(TOKENS))
    trace = model.trace() if seen else without_what_the_decode_side_read(model.trace())

    found = localise(trace, [align(trace, 0)], divergent)

    (first, *_) = [finding for finding in found.findings if not finding.latent]
    assert (first.kind, first.module, first.first_position) == ("state_restore", ATTENTION, CUT)
    assert {finding.kind for finding in found.findings} == {"state_restore"}
