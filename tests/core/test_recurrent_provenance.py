"""Recurrent state is copied from slot to slot: what was written is known by request and position."""

import dataclasses

import numpy as np
import pytest
from little_transformer import Model, Plant, run_prefill_cache_hit

from klbench.core.alignment import align
from klbench.core.localisation import localise
from klbench.core.trace import Arm, Phase, Slot, Trace

TOKENS = [3 + (5 * place) % 11 for place in range(14)]
PROMPT, LAYER = 9, 1
OPERATOR = f"model.layers.{LAYER}.attn"


def moved(trace: Trace, state: str) -> Trace:
    """The trace as if the generation arm had got copies of all state, in slots of its own."""
    arm = np.zeros(len(trace.forward_number), dtype=np.int64)
    arm[trace.row_forward] = trace.row_arm
    elsewhere = arm[trace.slot_forward] == Arm.GENERATION
    return dataclasses.replace(
        trace,
        operators=tuple(
            dataclasses.replace(operator, state=state if operator.state else None)
            for operator in trace.operators
        ),
        slot_pool=np.where(elsewhere, trace.slot_pool + 100_000, trace.slot_pool),
    )


def _located(plants: tuple[Plant, ...], state: str) -> list[tuple[str, str, int]]:
    model = Model(3, window=2, plants=plants, observes_state=True)
    divergent = run_prefill_cache_hit(model, TOKENS, PROMPT)
    trace = moved(model.trace(), state)
    found = localise(trace, [align(trace, 0)], divergent).findings
    return [(finding.kind, finding.module, finding.first_position) for finding in found]


def _restored(arm: Arm, _: int, phase: Phase) -> bool:
    return arm == Arm.GENERATION and phase == Phase.RESTORED


def test_a_copy_that_is_not_what_was_written_is_a_wrong_restore() -> None:
    plant = Plant(LAYER, "restore", _restored)
    assert _located((plant,), "conv")[0] == ("state_restore", OPERATOR, PROMPT - 1)
    # A K/V row has one slot: one that nobody was seen to write tells nothing.
    assert _located((plant,), "kv")[0][0] == "not_observed"


@pytest.mark.parametrize("at", [PROMPT, PROMPT + 2])
def test_a_wrong_write_is_found_through_copies(at: int) -> None:
    def decoding(arm: Arm, position: int, phase: Phase) -> bool:
        return arm == Arm.GENERATION and phase == Phase.DECODE and position == at

    assert _located((Plant(LAYER, "write", decoding),), "conv")[0] == ("state_write", OPERATOR, at)


def test_right_copies_accuse_nobody() -> None:
    assert _located((), "conv") == []
    operator = Plant(LAYER, "attn", _restored)
    assert _located((operator,), "conv")[0][:2] == ("operator", OPERATOR)


def of_another(trace: Trace) -> Trace:
    """The trace with one more write at the position that was restored, by a request that began alike, of what
    is then read."""
    operator = next(n for n, o in enumerate(trace.operators) if o.module == OPERATOR)
    arm = np.zeros(len(trace.forward_number), dtype=np.int64)
    arm[trace.row_forward] = trace.row_arm
    mine = (trace.slot_operator == operator) & (trace.slot_kind == Slot.READ)
    (read,) = np.flatnonzero(
        mine & (arm[trace.slot_forward] == Arm.GENERATION) & (trace.slot_position == PROMPT - 3)
    )[:1]
    values = {
        "kind": Slot.WRITTEN,
        "forward": 0,
        "operator": operator,
        "argument": trace.slot_argument[read],
        "event": 0,
        "request": 5,
        "position": trace.slot_position[read],
        "pool": 7,
    }
    columns = {
        f"slot_{name}": np.append(getattr(trace, f"slot_{name}"), value) for name, value in values.items()
    }
    digest = np.concatenate([trace.slot_digest, trace.slot_digest[read : read + 1]])
    return dataclasses.replace(trace, slot_digest=digest, **columns)


def test_a_checkpoint_that_another_request_left_is_right_where_it_is_what_that_one_wrote() -> None:
    model = Model(3, window=2, plants=(Plant(LAYER, "restore", _restored),), observes_state=True)
    divergent = run_prefill_cache_hit(model, TOKENS, PROMPT)
    trace = of_another(moved(model.trace(), "conv"))

    found = localise(trace, [align(trace, 0)], divergent).findings

    assert found[0].kinds == ("not_observed",)
    assert "Request 5 wrote there" in " ".join(fact.text for fact in found[0].evidence)
    assert not any("state_restore" in finding.kinds for finding in found)
