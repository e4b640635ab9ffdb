"""Which passes can be compared: those whose forwards held the same rows."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from klbench.engine.answers import Generated, Logprobs
from klbench.engine.arms import ArmOptions
from klbench.engine.capture_control import RequestIds
from klbench.engine.experiments import Pass, Passes, composed_equally, most_alike
from tests.core.made_columns import make_columns

SPLIT, WHOLE, OTHER = (3, 1), (4,), (2, 2)


def made(*shapes: Any) -> list[Pass]:
    return [Pass(None, shape) for shape in shapes]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shapes", "chosen"),
    [
        ((WHOLE, WHOLE, WHOLE), 0),
        # A run that was made of other batches than all its repeats.
        ((SPLIT, WHOLE, WHOLE), 1),
        ((SPLIT, OTHER, WHOLE), 0),
        ((SPLIT, OTHER, SPLIT), 0),
        ((None, None, WHOLE, WHOLE), 2),
        ((None, None), 0),
    ],
)
def test_repeats_are_compared_with_a_pass_of_the_most_common_batches(
    shapes: tuple[Any, ...], chosen: int
) -> None:
    passes = made(*shapes)
    assert most_alike(passes) is passes[chosen]


def test_what_was_not_observed_equals_nothing() -> None:
    one, other = made(None, None)
    assert not composed_equally(one, other)


class Retracting:
    """Generates 100, 101, ... with the logprob -token / 64; the `lost` requests lack their first one."""

    def __init__(self, lost: set[int]) -> None:
        self.lost = lost

    async def flush(self) -> None: ...

    async def generate(self, input_ids: list[list[int]], **how: Any) -> list[Generated]:
        answers = []
        for index, ids in enumerate(input_ids):
            first = 100 + sum(token >= 100 for token in ids)
            output = [first + n for n in range(how["max_new_tokens"])]
            kept = output[1:] if index in self.lost and how["max_new_tokens"] > 1 else output
            nats = np.array([-token / 64 for token in kept])
            answers.append(
                Generated(
                    rid="",
                    prompt_tokens=len(ids),
                    cached_tokens=len(ids) - 1,
                    output_ids=output,
                    finish_reason="length",
                    retractions=int(kept is not output),
                    dp_rank=None,
                    input_logprobs=None,
                    output_logprobs=Logprobs(nats, np.array(kept), 0),
                )
            )
        return answers


@pytest.mark.parametrize("lost", [set(), {1}, {0, 1}])
async def test_tokens_at_equal_rows_are_found_behind_a_logprob_that_was_lost(lost: set[int]) -> None:
    server = SimpleNamespace(client=Retracting(lost), arm_options=ArmOptions, control_dir=None, nonce=None)
    passes = Passes(server, RequestIds("fade"), max_new_tokens=4)  # type: ignore[arg-type]
    columns = make_columns(prompt_len=[3, 3], decode=[[-1.0] * 4] * 2, prefill=[[-1.0] * 3 + [-2.0]] * 2)
    pairs = await passes.equal_rows(columns)
    assert [(pair.request, pair.offset) for pair in pairs] == [(0, 3), (1, 3)]
    assert all(pair.same_token and pair.same_bits for pair in pairs)
