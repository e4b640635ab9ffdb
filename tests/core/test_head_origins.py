"""The head's own operators are origins like any other, though they belong to the logits processor."""

import dataclasses

import numpy as np
import pytest
from little_transformer import Model, Plant, WithHead, run_match

from klbench.core.alignment import align
from klbench.core.confirmation import arm_rows
from klbench.core.localisation import localise
from klbench.core.origins import is_logits
from klbench.core.trace import Arm, Phase, Trace

TOKENS = list(range(5, 19))
PROMPT = 8


def _down_as_lm_head(trace: Trace) -> Trace:
    as_head = tuple(
        dataclasses.replace(operator, module="lm_head", class_name="LogitsProcessor")
        if operator.module == "model.layers.1.down"
        else operator
        for operator in trace.operators
    )
    assert as_head != trace.operators
    return dataclasses.replace(trace, operators=as_head)


def test_an_operator_of_the_head_that_differs_behind_equal_rows_is_named() -> None:
    plant = Plant(1, "down", lambda _arm, position, phase: position >= 9 and phase.name == "DECODE")
    model = Model(2, plants=(plant,))
    divergent = run_match(model, TOKENS, PROMPT)
    trace = model.trace()
    trace = dataclasses.replace(_down_as_lm_head(trace), observes_head=True)

    finding = localise(trace, [align(trace, 0)], divergent).findings[0]

    assert (finding.kinds, finding.module, finding.first_position) == (("head",), "lm_head", 9)


@pytest.mark.parametrize(("module", "expected"), [("logits_processor", True), ("lm_head", False)])
def test_only_the_logits_processor_itself_has_pruned_rows(module: str, expected: bool) -> None:
    operator = dataclasses.replace(Model(1).trace().operators[0], module=module, class_name="LogitsProcessor")
    assert is_logits(operator) is expected


def test_what_the_head_makes_of_rows_that_score_no_compared_token_is_no_origin() -> None:
    """The last row of each chunk of a prompt reaches the head too; its logits are thrown away."""

    def at_chunk_ends_and_in_decode(arm: Arm, position: int, _phase: Phase) -> bool:
        return arm == Arm.GENERATION and (position in (2, 5) or position >= PROMPT - 1)

    model = Model(2, plants=(Plant(1, "down", at_chunk_ends_and_in_decode),))
    divergent = run_match(model, TOKENS, PROMPT, chunk=3)
    trace = dataclasses.replace(_down_as_lm_head(model.trace()), observes_head=True)

    finding = localise(trace, [align(trace, 0)], divergent, first_token=PROMPT).findings[0]

    assert (finding.kind, finding.module, finding.first_position) == ("head", "lm_head", PROMPT - 1)
    assert localise(trace, [align(trace, 0)], divergent).findings[0].first_position == 2


@pytest.mark.parametrize(
    ("place", "kind", "module"),
    [
        ("to_processor", "gap", "model.norm -> logits_processor"),
        ("to_lm_head", "gap", "model.norm -> lm_head"),
        ("to_logits", "gap", "lm_head -> logits"),
        ("to_logprob", "gap", "logits -> logprob"),
        ("lm_head", "head", "lm_head"),
        ("logits", "head", "logits"),
        ("logprob", "head", "logprob"),
    ],
)
def test_what_lies_at_the_end_of_a_divergent_row_is_never_latent(place: str, kind: str, module: str) -> None:
    """What the head makes of a prompt's other rows nobody uses, so no origin begins there."""

    def decode_and_a_chunks_end(arm: Arm, position: int, _phase: Phase) -> bool:
        return arm == Arm.GENERATION and (position == 2 or position >= 9)

    model = WithHead(2, plants=(Plant(2, place, decode_and_a_chunks_end),))
    divergent = run_match(model, TOKENS, PROMPT, chunk=3)
    trace = model.trace()

    (finding,) = localise(trace, [align(trace, 0)], divergent, first_token=PROMPT).findings

    assert divergent.tolist() == [10, 11, 12, 13]
    assert (finding.kind, finding.module, finding.first_position, finding.latent) == (kind, module, 9, False)


def test_a_head_operator_whose_inputs_were_not_seen_is_not_latent_where_its_row_diverges() -> None:
    plant = Plant(2, "lm_head", lambda _arm, position, phase: position >= 9 and phase == Phase.DECODE)
    model = WithHead(2, plants=(plant,))
    model.unseen_inputs = {"lm_head"}
    divergent = run_match(model, TOKENS, PROMPT)
    trace = model.trace()

    finding = localise(trace, [align(trace, 0)], divergent, first_token=PROMPT).findings[0]

    assert (finding.kinds[0], finding.module, finding.latent) == ("not_observed", "lm_head", False)


@pytest.mark.parametrize("seen", [True, False])
def test_an_origin_in_the_lm_head_says_how_many_rows_its_calls_had(seen: bool) -> None:
    plant = Plant(2, "lm_head", lambda _arm, position, phase: position >= 9 and phase == Phase.DECODE)
    model = WithHead(2, plants=(plant,))
    divergent = run_match(model, TOKENS, PROMPT)
    trace = model.trace()
    if seen:
        rows = np.flatnonzero(trace.row_position >= PROMPT)
        of_call = np.where(trace.row_arm[rows] == Arm.SCORING, 2048, 32)
        trace = dataclasses.replace(trace, head_row=rows, head_rows=of_call)

    finding = localise(trace, [align(trace, 0)], divergent, first_token=PROMPT).findings[0]

    assert finding.module == "lm_head"
    assert arm_rows(finding) == ((32, 2048) if seen else ())
