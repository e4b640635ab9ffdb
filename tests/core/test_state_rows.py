"""Rows of state in words: which, where, who wrote them, who read something else."""

import dataclasses

from little_transformer import Model, Plant, run_match, run_prefill_cache_hit

from klbench.core.alignment import align
from klbench.core.findings import Evidence
from klbench.core.localisation import localise
from klbench.core.state_rows import StateRows
from klbench.core.trace import Arm, Phase

PROMPT, TOTAL = 7, 14
TOKENS = [3 + (5 * place) % 11 for place in range(TOTAL)]
KEY = StateRows(1, ("k",), (175,), (412,), Arm.GENERATION, 0, Arm.WARMING)


def test_a_wrong_restore_names_the_row_its_slot_and_who_wrote_it() -> None:
    assert KEY.sentence() == (
        "The K row of position 175 (layer 1, pool slot 412) is not what was written: request 0 wrote it in "
        "the warming arm, the generation arm read other bits."
    )


def test_many_rows_are_a_range_and_their_first_slots() -> None:
    rows = dataclasses.replace(KEY, positions=tuple(range(160, 176)), slots=tuple(range(16)))

    assert rows.what == "K rows of positions 160 to 175 (layer 1, pool slots 0, 1, 2, 3, ...)"


def test_a_wrong_write_is_told_against_the_scoring_arm() -> None:
    write = dataclasses.replace(KEY, arguments=("k", "v"), read_in=None, written_in=Arm.GENERATION)

    assert write.sentence() == (
        "The K and V row of position 175 (layer 1, pool slot 412) was written with other bits in the "
        "generation arm than in the scoring arm, from equal inputs."
    )


def test_a_recurrent_state_has_no_row() -> None:
    conv = dataclasses.replace(KEY, arguments=("conv",))

    assert conv.what == "conv state behind position 175 (layer 1, pool slot 412)"


def located(plant: Plant, run: object) -> Evidence:
    model = Model(3, plants=(plant,), observes_state=True)
    divergent = run(model, TOKENS, PROMPT)  # type: ignore[operator]
    trace = model.trace()
    finding = localise(trace, [align(trace, 0)], divergent).findings[0]
    (fact,) = (fact for fact in finding.evidence if fact.code == finding.kind)
    return fact


def test_the_finding_of_a_restore_names_slot_layer_and_position() -> None:
    fact = located(Plant(1, "restore", lambda _a, _p, phase: phase == Phase.RESTORED), run_prefill_cache_hit)

    assert fact.values["state_position"] == PROMPT - 3
    assert fact.values["state_layer"] == 1
    assert (fact.values["written_in"], fact.values["read_in"]) == ("warming", "generation")
    assert f"position {PROMPT - 3} (layer 1, pool slot {fact.values['slot']})" in fact.text


def test_the_finding_of_a_write_names_slot_layer_and_position() -> None:
    fact = located(Plant(2, "write", lambda arm, p, _: arm == Arm.GENERATION and p == 9), run_match)

    assert (fact.values["state_position"], fact.values["state_layer"]) == (9, 2)
    assert fact.values["written_in"] == "generation"
    assert f"position 9 (layer 2, pool slot {fact.values['slot']})" in fact.text
