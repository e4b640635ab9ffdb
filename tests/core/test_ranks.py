"""With several ranks a difference has one birthplace: the others inherit it through what nobody hooks."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from little_transformer import Model, Plant, WithHead, on_ranks, run_match, run_retracted

from klbench.core.alignment import align
from klbench.core.findings import Localisation
from klbench.core.localisation import localise
from klbench.core.trace import Arm, Phase, Trace

TOKENS = list(range(5, 19))
PROMPT = 8
When = Callable[[Arm, int, Phase], bool]
Run = Callable[[Model], np.ndarray]


def decode(_arm: Arm, position: int, phase: Phase) -> bool:
    return position >= 9 and phase == Phase.DECODE


def only(row: int) -> When:
    return lambda _arm, position, phase: position == row and phase == Phase.DECODE


def match(model: Model) -> np.ndarray:
    return run_match(model, TOKENS, PROMPT)


def retracted(model: Model) -> np.ndarray:
    return run_retracted(model, TOKENS, PROMPT)


def traced(*plants: Plant, kind: type[Model] = Model, run: Run = match) -> tuple[Trace, np.ndarray]:
    model = kind(2, plants=plants, observes_state=True)
    divergent = run(model)
    return model.trace(), divergent


def located(first: tuple[Trace, np.ndarray], second: tuple[Trace, np.ndarray]) -> Localisation:
    trace = on_ranks(first[0], second[0])
    divergent = np.union1d(first[1], second[1])
    return localise(trace, [align(trace, 0, 0), align(trace, 0, 1)], divergent, first_token=PROMPT)


def said(found: Localisation) -> list[tuple[str, str, int, int, int]]:
    return [(f.kind, f.module, f.rank, f.first_position, f.count) for f in found.findings]


@pytest.mark.parametrize("born_on", [0, 1])
@pytest.mark.parametrize(
    ("here", "there"),
    [
        # The ranks' sums are added up in a gap, inside o, inside down.
        (Plant(0, "attn", decode), Plant(0, "residual", decode)),
        (Plant(0, "attn", decode), Plant(0, "o", decode)),
        (Plant(1, "up", decode), Plant(1, "down", decode)),
    ],
)
def test_what_one_rank_inherits_from_another_is_no_origin(here: Plant, there: Plant, born_on: int) -> None:
    traces = [traced(there), traced(there)]
    traces[born_on] = traced(here)

    found = located(traces[0], traces[1])

    module = f"model.layers.{here.layer}.{here.place}"
    assert said(found) == [("operator", module, born_on, 9, 4)]
    assert (found.around_position, found.around_rank, found.around_phase) == (9, born_on, "decode")
    assert [neighbour.module for neighbour in found.around if neighbour.origin] == [module]


def test_a_part_of_the_vocabulary_that_differs_is_no_fault_of_collecting_the_logits() -> None:
    whole = traced(Plant(2, "logits", decode), kind=WithHead)
    part = traced(Plant(2, "lm_head", decode), kind=WithHead)

    assert said(located(whole, part)) == [("head", "lm_head", 1, 9, 4)]


def test_the_head_as_a_whole_is_no_origin_where_another_ranks_rows_differ() -> None:
    equal, _ = traced()
    other, divergent = traced(Plant(1, "down", decode))

    assert said(located((equal, divergent), (other, divergent))) == [
        ("operator", "model.layers.1.down", 1, 9, 4)
    ]


@pytest.mark.parametrize(
    ("place", "kind", "module"),
    [
        ("residual", "gap", "model.layers.0.o -> model.layers.0.norm2"),
        ("o", "operator", "model.layers.0.o"),
    ],
)
def test_a_reduction_that_differs_behind_equal_parts_stays_one_origin_of_all_ranks(
    place: str, kind: str, module: str
) -> None:
    found = located(traced(Plant(0, place, decode)), traced(Plant(0, place, decode)))

    assert said(found) == [(kind, module, 0, 9, 4)]
    (fact,) = (fact for fact in found.findings[0].evidence if fact.code == "ranks")
    assert fact.values == {"ranks": [0, 1]}


def test_faults_of_two_ranks_at_rows_of_their_own_are_two_origins() -> None:
    found = located(traced(Plant(0, "up", only(9))), traced(Plant(1, "rope", only(11))))

    assert ("operator", "model.layers.0.up", 0, 9, 1) in said(found)
    assert ("operator", "model.layers.1.rope", 1, 11, 1) in said(found)


def test_a_difference_that_is_absorbed_on_one_rank_hides_no_operator_behind_it() -> None:
    absorbed = Plant(0, "o", decode, absorbed=True)
    late = Plant(1, "up", decode)

    found = located(traced(late), traced(absorbed, late))

    assert said(found) == [
        ("operator", "model.layers.0.o", 1, 9, 4),
        ("operator", "model.layers.1.up", 0, 9, 4),
    ]


def test_rows_that_were_computed_twice_are_compared_each_with_its_own() -> None:
    def resumed(_arm: Arm, position: int, phase: Phase) -> bool:
        return phase == Phase.RESUMED and position == 9

    inherits = traced(Plant(0, "residual", resumed), run=retracted)
    found = located(inherits, traced(Plant(0, "attn", resumed), run=retracted))
    assert said(found) == [("operator", "model.layers.0.attn", 1, 9, 1)]

    elsewhere = traced(Plant(0, "attn", only(9)), run=retracted)
    kinds = {(finding.kind, finding.phase) for finding in located(inherits, elsewhere).findings}
    assert kinds == {("gap", "resumed"), ("operator", "decode")}


def test_a_rank_that_inherits_all_lists_what_could_not_be_judged_there() -> None:
    found = located(traced(Plant(0, "o", decode)), traced(Plant(0, "attn", decode)))

    assert said(found) == [("operator", "model.layers.0.attn", 1, 9, 4)]
    early = [entry for entry in found.masked if entry.rank == 0 and entry.phase == "decode"]
    # Row 8 was equal: nothing was masked in the whole phase. Where all rows inherit, all is.
    assert early == []
    every: When = lambda _arm, _position, phase: phase == Phase.DECODE  # noqa: E731
    found = located(traced(Plant(0, "o", every)), traced(Plant(0, "attn", every)))
    masked = {(entry.module, entry.because) for entry in found.masked if entry.rank == 0}
    assert ("model.layers.0.o", "model.layers.0.attn") in masked


def test_ranks_that_do_not_hook_the_same_operators_are_compared_all_the_same() -> None:
    inherits, divergent = traced(Plant(0, "residual", decode))
    unseen = [n for n, op in enumerate(inherits.operators) if op.module.endswith((".attn", ".o"))]
    kept = ~np.isin(inherits.tensor_operator, unseen)
    tensors = {
        field.name: getattr(inherits, field.name)[kept]
        for field in dataclasses.fields(inherits)
        if field.name.startswith("tensor_") and field.name != "tensor_row"
    }
    blind = dataclasses.replace(inherits, **tensors)

    found = located((blind, divergent), traced(Plant(0, "attn", decode)))

    assert said(found) == [("operator", "model.layers.0.attn", 1, 9, 4)]


def test_a_gap_is_left_open_where_another_rank_cannot_be_compared() -> None:
    trace = on_ranks(traced(Plant(0, "residual", decode))[0], traced()[0])
    here = np.flatnonzero(trace.forward_rank[trace.row_forward] == 1)
    token = trace.row_token.copy()
    token[here[0]] += 1
    trace = dataclasses.replace(trace, row_token=token)

    found = localise(trace, [align(trace, 0, 0), align(trace, 0, 1)], np.array([10]), first_token=PROMPT)

    refused, gap = found.findings
    assert (refused.kind, refused.rank) == ("not_aligned", 1)
    assert (gap.kinds, gap.rank) == (("gap", "not_observed"), 0)
    assert "ranks_not_compared" in {fact.code for fact in gap.evidence}
