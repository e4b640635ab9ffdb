"""What the scoring arm read is no single truth: cut into chunks it reads a state more than once."""

from itertools import pairwise

import numpy as np
import pytest
from little_transformer import Model, Plant

from klbench.core.alignment import align
from klbench.core.localisation import localise
from klbench.core.trace import Arm, Phase

TOKENS = [3 + (5 * place) % 11 for place in range(18)]
PROMPT = 11
ATTENTION = "model.layers.1.attn"


def _run(model: Model, cuts: dict[Arm, list[int]]) -> np.ndarray:
    """match, with each arm's prefill cut where it says."""
    for arm, end in ((Arm.GENERATION, PROMPT), (Arm.SCORING, len(TOKENS))):
        edges = [0, *cuts[arm], end]
        for first, last in pairwise(edges):
            model.extend(arm, TOKENS[first:last], first, Phase.CHUNK if first else Phase.EXTEND)
        if arm == Arm.GENERATION:
            for position in range(PROMPT, len(TOKENS) - 1):
                model.decode(arm, TOKENS[position], position)
            model.flush()
    return model.divergent_tokens(PROMPT, len(TOKENS))


@pytest.mark.parametrize("cut", [4, 6, 9])
@pytest.mark.parametrize("other", [[], [7]])
def test_a_state_that_a_later_chunk_of_the_scoring_arm_finds_wrong_is_named_there(
    cut: int, other: list[int]
) -> None:
    """The first chunk read it rightly, as the generation arm did: only the second reading tells."""

    def at_the_cut(arm: Arm, position: int, phase: Phase) -> bool:
        return arm == Arm.SCORING and phase == Phase.CHUNK and position == cut

    model = Model(3, plants=(Plant(1, "restore", at_the_cut),), observes_state=True)
    divergent = _run(model, {Arm.GENERATION: other, Arm.SCORING: [cut]})
    assert len(divergent)

    trace = model.trace()
    found = localise(trace, [align(trace, 0)], divergent).findings

    first = found[0]
    assert (first.kind, first.module, first.first_position) == ("state_restore", ATTENTION, cut)
    assert {finding.kind for finding in found} == {"state_restore"}


@pytest.mark.parametrize("cuts", [[], [4], [4, 9]])
def test_reading_twice_what_was_written_accuses_nobody(cuts: list[int]) -> None:
    model = Model(3, observes_state=True)
    divergent = _run(model, {Arm.GENERATION: [5], Arm.SCORING: cuts})
    assert not len(divergent)
    trace = model.trace()
    assert localise(trace, [align(trace, 0)], divergent).findings == ()
