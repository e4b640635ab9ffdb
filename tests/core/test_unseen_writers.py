"""A slot's writer is who wrote it last, recorded or not: of what nobody saw written nothing is said."""

import dataclasses

import numpy as np
import pytest
from little_transformer import Model, Plant, run_match, run_prefill_cache_hit

from klbench.core.alignment import align
from klbench.core.findings import Finding
from klbench.core.localisation import localise
from klbench.core.trace import ANY_SLOT, Arm, Phase, Trace

TOKENS = [3 + (5 * place) % 11 for place in range(14)]
PROMPT, LAYER = 9, 1
ATTENTION = f"model.layers.{LAYER}.attn"
RESTORED = Plant(LAYER, "restore", lambda arm, _, phase: arm == Arm.GENERATION and phase == Phase.RESTORED)
SPOILT = PROMPT - 3
"""The position whose K row the plant spoils before the row at PROMPT - 1 reads it."""


def spread(trace: Trace) -> Trace:
    """The trace with room for other forwards between its own: they have the numbers 10, 20, ..."""
    return dataclasses.replace(trace, forward_number=trace.forward_number * 10)


def also_written(trace: Trace, number: int, pool: int, *, windowed: bool = False, rank: int = 0) -> Trace:
    values = {"number": number, "rank": rank, "pool": pool, "windowed": windowed}
    columns = {f"unseen_{name}": np.array([value], dtype=np.int64) for name, value in values.items()}
    return dataclasses.replace(trace, **columns)


def spoilt_slot(trace: Trace) -> int:
    operator = next(n for n, o in enumerate(trace.operators) if o.module == ATTENTION)
    mine = (trace.slot_operator == operator) & (trace.slot_position == SPOILT)
    return int(trace.slot_pool[mine][0])


def located(trace: Trace, divergent: np.ndarray) -> Finding:
    return localise(trace, [align(trace, 0)], divergent).findings[0]


@pytest.fixture
def restored() -> tuple[Trace, np.ndarray]:
    model = Model(3, plants=(RESTORED,), observes_state=True)
    divergent = run_prefill_cache_hit(model, TOKENS, PROMPT)
    return spread(model.trace()), divergent


@pytest.mark.parametrize("number", [15, 20])
def test_a_slot_that_another_request_got_in_between_accuses_no_restore(
    restored: tuple[Trace, np.ndarray], number: int
) -> None:
    """Between the warming forward and the one that reads, or in another row of that one."""
    trace, divergent = restored
    assert located(trace, divergent).kinds == ("state_restore",)

    found = located(also_written(trace, number, spoilt_slot(trace)), divergent)

    assert (found.kinds, found.module, found.grade) == (("not_observed",), ATTENTION, "unknown")
    assert "writer_not_observed" in {fact.code for fact in found.evidence}


def test_past_what_was_noted_any_slot_may_have_been_written(restored: tuple[Trace, np.ndarray]) -> None:
    trace, divergent = restored
    assert located(also_written(trace, 15, ANY_SLOT), divergent).kinds == ("not_observed",)


@pytest.mark.parametrize(
    ("number", "further", "windowed", "rank"),
    [
        (5, 0, False, 0),
        (10, 0, False, 0),
        (25, 0, False, 0),
        (15, 1, False, 0),
        (15, 0, True, 0),
        (15, 0, False, 1),
    ],
)
def test_what_others_wrote_before_or_after_or_elsewhere_excuses_nothing(
    restored: tuple[Trace, np.ndarray], number: int, further: int, windowed: bool, rank: int
) -> None:
    trace, divergent = restored
    written = also_written(trace, number, spoilt_slot(trace) + further, windowed=windowed, rank=rank)

    assert located(written, divergent).kinds == ("state_restore",)


def test_layers_with_a_pool_of_their_own_are_spoken_of_by_its_slots() -> None:
    model = Model(3, window=4, plants=(RESTORED,), observes_state=True)
    divergent = run_prefill_cache_hit(model, TOKENS, PROMPT)
    trace = spread(model.trace())

    assert (
        located(also_written(trace, 15, spoilt_slot(trace), windowed=True), divergent).kind == "not_observed"
    )
    assert located(also_written(trace, 15, spoilt_slot(trace)), divergent).kind == "not_observed"


def test_who_gets_a_slot_of_a_request_that_still_runs_spoils_it() -> None:
    def late(arm: Arm, position: int, phase: Phase) -> bool:
        return arm == Arm.GENERATION and phase == Phase.DECODE and position == PROMPT + 1

    model = Model(3, plants=(Plant(LAYER, "restore", late),), observes_state=True)
    divergent = run_match(model, TOKENS, PROMPT)
    trace = spread(model.trace())
    operator = next(n for n, o in enumerate(trace.operators) if o.module == ATTENTION)
    mine = (trace.slot_operator == operator) & (trace.slot_position == PROMPT - 1)
    trace = also_written(trace, 25, int(trace.slot_pool[mine][0]))

    assert located(trace, divergent).kinds == ("state_restore",)
    # A request that was retracted in between gave its slots away.
    again = dataclasses.replace(
        trace, row_phase=np.where(trace.row_forward == 2, Phase.RESUMED, trace.row_phase)
    )
    assert located(again, divergent).kinds == ("not_observed",)
