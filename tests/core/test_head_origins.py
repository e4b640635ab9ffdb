"""The head's own operators are origins like any other, though they belong to the logits processor."""

import dataclasses

import pytest
from little_transformer import Model, Plant, run_match

from klbench.core.alignment import align
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
