"""What the state alone tells: restore, write and arithmetic apart, by layer and position, and no operator."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from little_transformer import LEAVES, Model, Plant, on_ranks, run_match, run_prefill_cache_hit

from klbench.core.alignment import align
from klbench.core.findings import Finding, Localisation
from klbench.core.state_localisation import localise_state
from klbench.core.trace import STATE_ONLY, Arm, Phase, Trace

PROMPT, TOTAL = 7, 14
TOKENS = [3 + (5 * place) % 11 for place in range(TOTAL)]
Run = Callable[[Model, list[int], int], np.ndarray]


def state_only(trace: Trace) -> Trace:
    """The trace as the probe makes it: stateful operators, rows, reads and slots, and no tensor.

    The model writes one value a position: it stands for the K row; the V row tells of the same input before
    the write.
    """
    stateful = [number for number, operator in enumerate(trace.operators) if operator.state is not None]
    renumbered = np.full(len(trace.operators), -1, dtype=np.int64)
    renumbered[stateful] = np.arange(len(stateful))
    nothing = {
        name: getattr(trace, name)[:0]
        for name in Trace.__dataclass_fields__
        if name.startswith("tensor_") or name == "digest"
    }
    return dataclasses.replace(
        trace,
        backend=STATE_ONLY,
        operators=tuple(trace.operators[number] for number in stateful),
        arguments=("v", "k"),
        read_operator=renumbered[trace.read_operator],
        slot_operator=renumbered[trace.slot_operator],
        **nothing,
    )


def probed(model: Model, run: Run = run_match) -> Localisation:
    divergent = run(model, TOKENS, PROMPT)
    trace = state_only(model.trace())
    alignment = align(trace, 0)
    assert alignment.proved, alignment.reason
    return localise_state(trace, [alignment], divergent)


def said(found: Localisation) -> list[tuple[str, int, int]]:
    return [(f.module, f.first_position, f.count) for f in found.findings]


def codes(finding: Finding) -> set[str]:
    return {fact.code for fact in finding.evidence}


def in_decode(_arm: Arm, _position: int, phase: Phase) -> bool:
    return phase == Phase.DECODE


@pytest.mark.parametrize("run", [run_match, run_prefill_cache_hit])
def test_equal_state_and_no_divergence_blame_nothing(run: Run) -> None:
    found = probed(Model(3, observes_state=True), run)

    assert (found.findings, found.masked, found.map) == ((), (), None)


def test_a_restored_row_that_is_not_what_was_written_is_a_restore() -> None:
    plant = Plant(1, "restore", lambda _arm, _position, phase: phase == Phase.RESTORED)

    found = probed(Model(3, plants=(plant,), observes_state=True), run_prefill_cache_hit)

    first = found.findings[0]
    assert (first.kinds, first.module, first.layer) == (("state_restore",), "model.layers.1", 1)
    assert (first.first_position, first.phase, first.grade) == (PROMPT - 1, "restored", "probable")
    (fact,) = (fact for fact in first.evidence if fact.code == "state_restore")
    assert (fact.values["state_position"], fact.values["written_in"]) == (PROMPT - 3, "warming")
    assert "state_probe" in codes(first)


@pytest.mark.parametrize("leaf", ["attn", "o", "norm2", "down"])
def test_arithmetic_is_born_between_the_state_of_two_layers(leaf: str) -> None:
    found = probed(Model(3, plants=(Plant(0, leaf, in_decode),), observes_state=True))

    assert said(found) == [("model.layers.0 -> model.layers.1", PROMPT, TOTAL - 1 - PROMPT)]
    first = found.findings[0]
    assert first.kinds == ("operator", "gap", "state_write")
    assert (first.layer, first.phase, first.latent) == (1, "decode", False)
    assert {(m.module, m.phase) for m in found.masked} == {("model.layers.2", "decode")}


def test_arithmetic_before_the_first_state_is_born_behind_the_embedding() -> None:
    found = probed(Model(2, plants=(Plant(0, "qkv", in_decode),), observes_state=True))

    assert said(found)[0][0] == "the embedding -> model.layers.0"


@pytest.mark.parametrize("leaf", ["attn", "down"])
def test_what_is_born_behind_the_last_state_is_said_to_be(leaf: str) -> None:
    found = probed(Model(2, plants=(Plant(1, leaf, in_decode),), observes_state=True))

    assert said(found) == [("model.layers.1 -> logprob", PROMPT, TOTAL - 1 - PROMPT)]
    assert found.findings[0].kinds == ("operator", "gap", "head")
    assert found.map is not None
    assert 3 in found.map.cells[-1]


def test_two_origins_in_different_layers_and_rows_are_both_found() -> None:
    plants = (
        Plant(2, "o", lambda arm, position, _: arm == Arm.GENERATION and position == 9),
        Plant(0, "o", lambda arm, position, _: arm == Arm.GENERATION and position == 11),
    )

    found = probed(Model(4, plants=plants, observes_state=True))

    assert said(found) == [
        ("model.layers.2 -> model.layers.3", 9, 1),
        ("model.layers.0 -> model.layers.1", 11, 1),
    ]


def with_half_as_v(trace: Trace) -> Trace:
    """As if each write had a V row too, made from the same hidden row and written right."""
    mine = np.flatnonzero(trace.slot_kind == 0)
    columns = {
        name: np.concatenate([getattr(trace, name), getattr(trace, name)[mine]])
        for name in Trace.__dataclass_fields__
        if name.startswith("slot_") and name != "slot_digest"
    }
    columns["slot_argument"][len(trace.slot_kind) :] = 0
    same = np.stack([trace.slot_position[mine], trace.slot_operator[mine]], axis=1).astype(np.uint64)
    return dataclasses.replace(trace, slot_digest=np.concatenate([trace.slot_digest, same]), **columns)


def test_a_key_that_differs_beside_an_equal_value_is_most_likely_written_wrong() -> None:
    plant = Plant(1, "write", lambda arm, position, _: arm == Arm.GENERATION and position == 9)
    model = Model(3, plants=(plant,), observes_state=True)
    divergent = run_match(model, TOKENS, PROMPT)
    trace = with_half_as_v(state_only(model.trace()))

    found = localise_state(trace, [align(trace, 0)], divergent)

    first = found.findings[0]
    assert (first.module, first.layer, first.first_position) == ("model.layers.1", 1, 9)
    assert first.kinds == ("state_write", "operator", "gap")
    (fact,) = (fact for fact in first.evidence if fact.code == "state_differs")
    assert fact.values["arguments"] == ["k"]
    assert "pool slot" in fact.text


def test_a_refused_pairing_locates_nothing() -> None:
    model = Model(2, observes_state=True)
    run_match(model, TOKENS, PROMPT)
    trace = dataclasses.replace(state_only(model.trace()), invalid="the disk was full")

    (finding,) = localise_state(trace, [align(trace, 0)], np.array([9])).findings

    assert (finding.kind, finding.grade) == ("not_aligned", "unknown")


def expected_place(layer: int, leaf: str, layers: int) -> str:
    """Between which states a difference of this operator is born."""
    if leaf in ("norm", "qkv", "rope"):
        return (
            f"model.layers.{layer - 1} -> model.layers.{layer}"
            if layer
            else "the embedding -> model.layers.0"
        )
    behind = f"model.layers.{layer + 1}" if layer + 1 < layers else "logprob"
    return f"model.layers.{layer} -> {behind}"


@settings(max_examples=60)
@given(
    layer=st.integers(0, 3),
    leaf=st.sampled_from(LEAVES),
    position=st.integers(PROMPT - 1, TOTAL - 2),
    window=st.sampled_from([None, 3]),
)
def test_one_planted_origin_is_found_at_its_row_between_the_states_around_it(
    layer: int, leaf: str, position: int, window: int | None
) -> None:
    plant = Plant(layer, leaf, lambda arm, at, _: arm == Arm.GENERATION and at == position)

    found = probed(Model(4, window=window, plants=(plant,), observes_state=True))

    assert said(found) == [(expected_place(layer, leaf, 4), position, 1)]
    assert not found.findings[0].latent


def probed_on_ranks(*plants: Plant) -> Localisation:
    """The state of two ranks, each with one of `plants`."""
    models = [Model(3, plants=(plant,), observes_state=True) for plant in plants]
    divergent = [run_match(model, TOKENS, PROMPT) for model in models]
    trace = on_ranks(*(state_only(model.trace()) for model in models))
    alignments = [align(trace, 0, rank) for rank in (0, 1)]
    return localise_state(trace, alignments, np.union1d(*divergent))


@pytest.mark.parametrize("born_on", [0, 1])
def test_what_a_rank_inherits_from_the_state_of_another_is_no_origin(born_on: int) -> None:
    """Its own heads' state is equal in that layer; the sum of all ranks' heads is not."""
    plants = [Plant(0, "residual", in_decode), Plant(0, "residual", in_decode)]
    plants[born_on] = Plant(0, "qkv", in_decode)

    found = probed_on_ranks(*plants)

    assert [(f.rank, f.module) for f in found.findings] == [(born_on, "the embedding -> model.layers.0")]
    assert (1 - born_on, "model.layers.1") in {(entry.rank, entry.module) for entry in found.masked}


def test_what_lies_behind_the_last_state_on_one_rank_is_inherited_where_another_reads_other_state() -> None:
    found = probed_on_ranks(Plant(2, "residual", in_decode), Plant(2, "qkv", in_decode))

    assert [(f.rank, f.module) for f in found.findings] == [(1, "model.layers.1 -> model.layers.2")]


def test_state_that_differs_alike_on_all_ranks_is_one_finding() -> None:
    (finding,) = probed_on_ranks(Plant(1, "qkv", in_decode), Plant(1, "qkv", in_decode)).findings

    assert "ranks" in codes(finding)
