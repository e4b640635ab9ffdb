"""Localisation finds exactly the origins that were planted, and says what they hide."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from little_transformer import LEAVES, Model, Plant, run_match, run_prefill_cache_hit

from klbench.core.alignment import align
from klbench.core.findings import Finding, Localisation
from klbench.core.localisation import localise
from klbench.core.trace import Arm, Direction, Phase, Trace

PROMPT, TOTAL = 7, 14
TOKENS = [3 + (5 * place) % 11 for place in range(TOTAL)]
Run = Callable[[Model, list[int], int], np.ndarray]


def run_in_chunks(model: Model, tokens: list[int], prompt: int) -> np.ndarray:
    return run_match(model, tokens, prompt, chunk=3)


def located(model: Model, run: Run = run_match) -> Localisation:
    divergent = run(model, TOKENS, PROMPT)
    trace = model.trace()
    return localise(trace, [align(trace, 0)], divergent)


def said(found: Localisation) -> list[tuple[str, int, int]]:
    return [(f.module, f.first_position, f.count) for f in found.findings]


def in_decode(arm: Arm, position: int, phase: Phase) -> bool:  # noqa: ARG001
    return phase == Phase.DECODE


def decoding_from(first: int) -> Callable[[Arm, int, Phase], bool]:
    return lambda _arm, position, phase: phase == Phase.DECODE and position >= first


@pytest.mark.parametrize("run", [run_match, run_prefill_cache_hit])
@pytest.mark.parametrize("observes_state", [False, True])
def test_a_clean_server_has_no_origin(run: Run, observes_state: bool) -> None:
    found = located(Model(3, observes_state=observes_state), run)

    assert found.findings == ()
    assert found.masked == ()
    assert found.map is None


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("observes_state", [False, True])
def test_a_fault_in_decode_is_found_in_its_operator_at_its_first_row(leaf: str, observes_state: bool) -> None:
    model = Model(3, plants=(Plant(1, leaf, decoding_from(9)),), observes_state=observes_state)

    found = located(model)

    assert said(found) == [(f"model.layers.1.{leaf}", 9, 4)]
    (finding,) = found.findings
    assert (finding.kind, finding.layer, finding.arm, finding.phase) == (
        "operator",
        1,
        "generation",
        "decode",
    )
    assert (finding.grade, finding.latent) == ("probable", False)
    if observes_state or leaf != "attn":
        assert finding.kinds == ("operator",)
    else:
        assert set(finding.kinds) == {"operator", "state_restore", "state_write", "not_observed"}


@pytest.mark.parametrize("wrong_arm", [Arm.GENERATION, Arm.SCORING])
@pytest.mark.parametrize("observes_state", [False, True])
def test_attention_wrong_over_prompt_rows_is_not_blamed_on_the_next_layer(
    wrong_arm: Arm, observes_state: bool
) -> None:
    def over_the_prompt(arm: Arm, position: int, _phase: Phase) -> bool:
        return arm == wrong_arm and 2 <= position < PROMPT

    found = located(Model(3, plants=(Plant(0, "attn", over_the_prompt),), observes_state=observes_state))

    assert said(found) == [("model.layers.0.attn", 2, PROMPT - 2)]


def test_decode_rows_alone_would_have_blamed_the_next_layer() -> None:
    """The trap itself: row by row, layer 1's attention has equal inputs and another output."""
    plant = Plant(0, "attn", lambda arm, position, _: arm == Arm.SCORING and position == 2)
    model = Model(2, plants=(plant,))
    run_match(model, TOKENS, PROMPT)
    trace = model.trace()
    aligned = align(trace, 0)
    attention = next(i for i, op in enumerate(trace.operators) if op.module == "model.layers.1.attn")
    inputs = aligned.comparison.together(aligned.comparison.columns(attention, Direction.IN))
    outputs = aligned.comparison.together(aligned.comparison.columns(attention, Direction.OUT))
    later = aligned.pairs.position > PROMPT

    assert (inputs[later] == 0).all()
    assert (outputs[later] == 2).all()


@pytest.mark.parametrize(
    ("gap", "named"),
    [
        ("before_o", "model.layers.1.attn -> model.layers.1.o"),
        ("residual", "model.layers.1.o -> model.layers.1.norm2"),
    ],
)
def test_unhooked_code_between_two_operators_is_a_gap(gap: str, named: str) -> None:
    found = located(Model(3, plants=(Plant(1, gap, in_decode),)))

    assert said(found) == [(named, PROMPT, TOTAL - 1 - PROMPT)]
    assert found.findings[0].kinds == ("gap",)
    assert found.findings[0].layer == 1


class KeyGap(Model):
    """Unhooked code between the rotary embedding and the attention, which changes the key alone."""

    def _tensor(self, path: str, direction: Direction, argument: int, values: list[int]) -> None:
        if path.endswith(".attn") and direction == Direction.IN and argument == 1:
            layer = int(path.split(".")[2])
            values[:] = [self._planted(layer, "key_gap", place, value) for place, value in enumerate(values)]
        super()._tensor(path, direction, argument, values)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("observes_state", [False, True])
def test_a_gap_before_the_key_alone_reaches_the_tokens_through_the_cache(
    layer: int, observes_state: bool
) -> None:
    plant = Plant(layer, "key_gap", lambda arm, position, _: arm == Arm.GENERATION and position in (2, 3))

    found = located(KeyGap(2, plants=(plant,), observes_state=observes_state))

    base = f"model.layers.{layer}"
    assert said(found) == [(f"{base}.rope -> {base}.attn", 2, 2)]
    assert not found.findings[0].latent


def test_a_container_whose_children_are_equal_is_a_gap_behind_its_last_child() -> None:
    model = Model(2)
    divergent = run_match(model, TOKENS, PROMPT)
    trace = model.trace()
    layer = next(i for i, op in enumerate(trace.operators) if op.module == "model.layers.1")
    digest = trace.digest.copy()
    for tensor in np.flatnonzero(
        (trace.tensor_operator == layer) & (trace.tensor_direction == Direction.OUT)
    ):
        rows = trace.tensor_row[
            trace.tensor_start[tensor] : trace.tensor_start[tensor] + trace.tensor_rows[tensor]
        ]
        if trace.row_phase[rows[0]] == Phase.DECODE:
            digest[trace.tensor_start[tensor]] ^= np.uint64(1)
    trace = dataclasses.replace(trace, digest=digest)

    found = localise(trace, [align(trace, 0)], divergent)

    assert [f.module for f in found.findings] == ["model.layers.1.down -> model.layers.1"]
    assert found.findings[0].latent


def test_a_wrong_key_in_a_restored_prefix_is_a_restore_where_state_is_seen() -> None:
    plant = Plant(1, "restore", lambda _arm, _position, phase: phase == Phase.RESTORED)

    found = located(Model(3, plants=(plant,), observes_state=True), run_prefill_cache_hit)

    assert said(found)[0][:2] == ("model.layers.1.attn", PROMPT - 1)
    first = found.findings[0]
    assert first.kinds == ("state_restore",)
    assert first.phase == "restored"
    assert [e.values["state_position"] for e in first.evidence if e.code == "state_restore"] == [PROMPT - 3]


def test_a_wrong_key_in_a_restored_prefix_is_likeliest_a_restore_where_state_is_not_seen() -> None:
    plant = Plant(1, "restore", lambda _arm, _position, phase: phase == Phase.RESTORED)

    found = located(Model(3, plants=(plant,)), run_prefill_cache_hit)

    assert said(found) == [("model.layers.1.attn", PROMPT - 1, TOTAL - PROMPT)]
    assert found.findings[0].kinds == ("state_restore", "operator", "state_write", "not_observed")
    assert "first_read_after_restore" in [e.code for e in found.findings[0].evidence]


@pytest.mark.parametrize("observes_state", [False, True])
def test_a_key_written_wrong_is_a_write_and_not_a_restore(observes_state: bool) -> None:
    plant = Plant(1, "write", lambda arm, position, _: arm == Arm.GENERATION and position == 9)

    found = located(Model(3, plants=(plant,), observes_state=observes_state))

    assert said(found)[0][:2] == ("model.layers.1.attn", 9)
    if observes_state:
        assert [f.kinds for f in found.findings] == [("state_write",)]
    else:
        assert "state_write" in found.findings[0].kinds


def test_a_cold_prefill_excludes_a_restore() -> None:
    plant = Plant(1, "attn", lambda arm, position, _: arm == Arm.GENERATION and position == 4)

    (finding,) = located(Model(2, plants=(plant,))).findings

    assert finding.kinds == ("operator", "state_write", "not_observed")
    assert "no_earlier_state" in [e.code for e in finding.evidence]


def test_two_faults_outside_each_others_cone_are_both_reported() -> None:
    late = Plant(0, "up", lambda arm, position, _: arm == Arm.GENERATION and position == 11)
    early = Plant(2, "o", lambda arm, position, _: arm == Arm.GENERATION and position == 9)

    found = located(Model(3, plants=(late, early)))

    assert said(found) == [("model.layers.2.o", 9, 1), ("model.layers.0.up", 11, 1)]


def test_a_fault_inside_the_cone_of_another_is_masked_and_never_clean() -> None:
    plants = (Plant(0, "o", in_decode), Plant(2, "up", in_decode))

    found = located(Model(3, plants=plants))

    assert said(found) == [("model.layers.0.o", PROMPT, TOTAL - 1 - PROMPT)]
    hidden = {(m.module, m.phase) for m in found.masked}
    assert ("model.layers.2.up", "decode") in hidden
    assert ("model.layers.0.attn", "decode") not in hidden
    assert {m.because for m in found.masked} == {"model.layers.0.o"}
    assert located(Model(3, plants=plants[1:])).findings[0].module == "model.layers.2.up"


def test_a_difference_that_the_next_operator_absorbs_is_latent() -> None:
    plant = Plant(1, "o", decoding_from(9), absorbed=True)

    found = located(Model(3, plants=(plant,)))

    assert said(found) == [("model.layers.1.o", 9, 4)]
    assert found.findings[0].latent


def test_an_equal_hidden_row_with_another_logprob_is_the_head() -> None:
    model = Model(2)
    run_match(model, TOKENS, PROMPT)
    trace = model.trace()

    found = localise(trace, [align(trace, 0)], np.array([10, 12]))

    (finding,) = found.findings
    assert (finding.kinds, finding.module) == (("head", "not_observed"), "logits_processor")
    assert (finding.first_position, finding.count, finding.latent) == (9, 2, False)
    assert finding.grade == "probable"
    assert "head_not_observed" in [e.code for e in finding.evidence]
    assert found.map is not None
    assert found.map.layers[-1] == "head"
    assert 3 in found.map.cells[-1]


def without(trace: Trace, module: str, direction: Direction, arm: Arm) -> Trace:
    """The trace as if this tensor had not been captured in one arm."""
    number = next(i for i, op in enumerate(trace.operators) if op.module == module)
    gone = (trace.tensor_operator == number) & (trace.tensor_direction == direction)
    gone &= trace.row_arm[trace.tensor_row[trace.tensor_start]] == arm
    names = ("forward", "operator", "direction", "argument", "dtype", "row_bytes", "event", "rows", "start")
    kept = {f"tensor_{n}": getattr(trace, f"tensor_{n}")[~gone] for n in names}
    return dataclasses.replace(trace, **kept)


def test_inputs_missing_in_one_arm_are_never_equal() -> None:
    model = Model(2, plants=(Plant(1, "up", in_decode),))
    divergent = run_match(model, TOKENS, PROMPT)
    trace = without(model.trace(), "model.layers.1.up", Direction.IN, Arm.SCORING)

    (finding,) = localise(trace, [align(trace, 0)], divergent).findings

    assert finding.kinds == ("not_observed",)
    assert finding.grade == "unknown"


def test_a_history_that_was_not_captured_leaves_the_finding_open() -> None:
    model = Model(2, plants=(Plant(1, "attn", in_decode),))
    divergent = run_match(model, TOKENS, PROMPT)
    trace = model.trace()
    # As if another request had computed the first rows of the prompt.
    request = trace.row_request.copy()
    request[(trace.row_arm == Arm.GENERATION) & (trace.row_position < 3)] = 5
    trace = dataclasses.replace(trace, row_request=request)

    (finding,) = localise(trace, [align(trace, 0)], divergent).findings

    assert "not_observed" in finding.kinds
    assert finding.grade == "unknown"


def test_the_operators_around_the_origin_and_the_map_show_it() -> None:
    found = located(Model(2, plants=(Plant(1, "o", decoding_from(9)),)))

    states = {n.module: (n.inputs, n.state, n.output, n.origin) for n in found.around}
    assert states["model.layers.1.o"] == ("equal", "none", "differs", True)
    # Its state was not read by this trace: what it was written from is equal.
    assert states["model.layers.1.attn"] == ("equal", "written_equal", "equal", False)
    assert states["model.layers.1.norm2"][0] == "differs"
    assert (found.around_position, found.around_arm) == (9, "generation")
    grid = found.map
    assert grid is not None
    assert grid.layers == ("0", "1", "head")
    column = grid.positions.index(9)
    assert [row[column] for row in grid.cells] == [0, 3, 2]
    assert [row[column - 1] for row in grid.cells] == [0, 0, 0]


def test_an_unproved_alignment_locates_nothing() -> None:
    model = Model(2, plants=(Plant(1, "o", in_decode),))
    divergent = run_match(model, TOKENS, PROMPT)
    trace = dataclasses.replace(model.trace(), invalid="the disk was full")

    (finding,) = localise(trace, [align(trace, 0)], divergent).findings

    assert finding.kinds == ("not_aligned",)
    assert "the disk was full" in finding.evidence[0].text


def by_definition(trace: Trace) -> set[tuple[str, int]]:
    """Origins by the definition alone, row by row, from the state as it was really read."""
    aligned = align(trace, 0)
    pairs, comparison = aligned.pairs, aligned.comparison
    reads = {
        (int(r), int(o)): tuple(d)
        for r, o, d in zip(trace.read_row, trace.read_operator, trace.read_digest.tolist(), strict=True)
    }
    found = set()
    for number, operator in enumerate(trace.operators):
        if operator.container or operator.module == "logits_processor":
            continue
        inputs = comparison.together(comparison.columns(number, Direction.IN))
        outputs = comparison.together(comparison.columns(number, Direction.OUT))
        for node in np.flatnonzero((inputs == 0) & (outputs == 2)):
            here, there = int(pairs.decode_row[node]), int(pairs.scoring_row[node])
            if reads.get((here, number)) == reads.get((there, number)):
                found.add((operator.module, int(pairs.position[node])))
    return found


plants = st.builds(
    lambda layer, place, arm, first, last: Plant(
        layer, place, lambda a, p, _: a == arm and first <= p <= max(first, last)
    ),
    st.integers(0, 2),
    st.sampled_from(LEAVES),
    st.sampled_from([Arm.WARMING, Arm.GENERATION, Arm.SCORING]),
    st.integers(0, TOTAL - 2),
    st.integers(0, TOTAL - 2),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.lists(plants, min_size=0, max_size=3),
    st.sampled_from([None, 2, 4]),
    st.sampled_from([run_match, run_in_chunks, run_prefill_cache_hit]),
)
def test_planted_operators_are_found_exactly_whatever_the_graph(
    chosen: list[Plant], window: int | None, run: Run
) -> None:
    """Without seeing state, what is found is what the definition gives with the state seen."""
    model = Model(3, window=window, plants=tuple(chosen), observes_state=True)
    divergent = run(model, TOKENS, PROMPT)
    full = model.trace()
    expected = by_definition(full)
    blind = Model(3, window=window, plants=tuple(chosen))
    run(blind, TOKENS, PROMPT)

    for trace in (full, blind.trace()):
        found = localise(trace, [align(trace, 0)], divergent)
        # Blind, the first row on a restored prefix is likelier a wrong restore than a wrong operator.
        likely = {"operator"} if trace is full else {"operator", "state_restore"}
        assert {f.kind for f in found.findings} <= likely
        assert {f.module for f in found.findings} == {module for module, _ in expected}
        first: dict[str, int] = {}
        for module, position in expected:
            first[module] = min(position, first.get(module, position))
        for module, position in first.items():
            assert min(f.first_position for f in found.findings if f.module == module) == position
        if len(divergent):
            assert not all(f.latent for f in found.findings)


def test_findings_are_the_objects_of_the_contract() -> None:
    found = located(Model(2, plants=(Plant(1, "o", in_decode),)))

    (document,) = [f.as_dict("match") for f in found.findings]
    assert set(document) == {
        *("kind", "kinds", "module", "layer", "request", "helper", "arm", "rank", "phase", "positions"),
        *("grade", "evidence", "ulp_max", "replay_M", "latent"),
    }
    assert document["positions"] == {"first": PROMPT, "count": TOTAL - 1 - PROMPT}
    assert isinstance(found.findings[0], Finding)
