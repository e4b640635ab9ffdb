"""What a capture takes: the whole generation if it can, and the requests that wrote a restored prefix."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from klbench.core.columns import HelperColumns
from klbench.engine.captured_work import (
    ServerSide,
    Work,
    as_whole_as_affordable,
    generation_tokens,
    prefix_writers,
)

OWN = list(range(100, 140))


def work(prompts: list[list[int]], request: int, cached: int) -> Work:
    requests = len(prompts)
    nothing = np.zeros(requests, dtype=np.int64)
    columns = HelperColumns(
        helper="prefill_cache_hit",
        prompt_len=np.array([len(prompt) for prompt in prompts]),
        cached_generation=np.full(requests, cached),
        cached_scoring=nothing,
        output_len=nothing,
        dropped=nothing.astype(np.bool_),
        start=np.zeros(requests + 1, dtype=np.int64),
        token_id=np.zeros(0, dtype=np.int32),
        decode_nats=np.zeros(0, dtype=np.float32),
        prefill_nats=np.zeros(0, dtype=np.float32),
        prompt_start=np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])]),
        prompt_ids=np.array([token for prompt in prompts for token in prompt], dtype=np.int32),
    )
    return Work("prefill_cache_hit", prompts, request, columns, 8)


def sharing(tokens: int) -> list[int]:
    return OWN[:tokens] + [7] * (40 - tokens)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        # The first with a prefix owns it; a longer one adds what goes beyond.
        ([sharing(20), sharing(20), sharing(30)], {0, 2}),
        ([sharing(30), sharing(20)], {0}),
        # A template's first tokens are not worth it.
        ([sharing(8), sharing(0)], set()),
        ([OWN[:25]], {0}),
        # Of many, the longest.
        ([sharing(length) for length in (16, 18, 20, 22, 24)], {2, 3, 4}),
    ],
)
def test_the_owners_of_a_shared_prefix_are_captured_too(others: list[list[int]], expected: set[int]) -> None:
    assert prefix_writers(work([*others, OWN], len(others), 39)) == expected


def test_a_request_that_restored_nothing_needs_nobody() -> None:
    assert prefix_writers(work([sharing(30), OWN], 1, 0)) == frozenset()


def divergent_at(offset: int, tokens: int) -> Work:
    found = work([OWN], 0, 0)
    decode = np.zeros(tokens, dtype=np.float32)
    prefill = decode.copy()
    prefill[offset] = 1.0
    columns = replace(
        found.measured,
        output_len=np.array([tokens]),
        start=np.array([0, tokens]),
        token_id=np.zeros(tokens, dtype=np.int32),
        decode_nats=decode,
        prefill_nats=prefill,
    )
    return replace(found, measured=columns, max_new_tokens=tokens)


def side() -> ServerSide:
    control = SimpleNamespace(forwards=None, ranks=[0])
    nothing = SimpleNamespace(nonce="a1b2")
    return ServerSide(client=nothing, control=control, ids=nothing, dumps=nothing, model_config={})  # type: ignore[arg-type]


def test_the_whole_generation_is_captured_where_the_forecast_affords_it() -> None:
    asked = divergent_at(5, 64)
    assert generation_tokens(asked) == 6

    whole = as_whole_as_affordable(side(), asked)

    assert (generation_tokens(whole), whole.cut) == (64, None)


def test_a_cut_capture_says_what_it_leaves_out_and_why() -> None:
    cut = as_whole_as_affordable(side(), divergent_at(5, 64), limit_bytes=1 << 20)

    assert generation_tokens(cut) == 6
    assert cut.cut is not None
    assert cut.cut.startswith("Only 6 of 64 generated tokens were captured")
    assert "the limit is 1 MiB" in cut.cut
