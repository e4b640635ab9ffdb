"""Prompts that repeat or share a prefix: what they restore from each other, and what they say about places.

Prompts that share a prefix hit the cache inside `match` too. A prompt that is there twice is a control for
free: the same tokens at two places of one batch must give the same logprobs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from klbench.core.columns import HelperColumns

_LONG_PREFIX = 16
"""Tokens; a shorter common beginning (BOS, a template's first words) is shared by all prompts of a model."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """`sharing` requests have a common prefix of at least 16 tokens with another; `longest` tokens is the
    longest such prefix. `repeated` requests have a prompt that occurs more than once. Of their pairs,
    `disagreeing` (first request, other request) differ in the generation arm over the tokens they share."""

    sharing: int
    longest: int
    repeated: int
    disagreeing: tuple[tuple[int, int], ...]


def read_sharing(columns: HelperColumns) -> Sharing:
    """Groups the prompts of one helper."""
    starts = columns.prompt_start
    prompts = [
        columns.prompt_ids[starts[i] : starts[i + 1]].astype(">i4").tobytes() for i in range(columns.requests)
    ]
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    common = np.zeros(len(prompts), dtype=np.int64)
    repeated = np.zeros(len(prompts), dtype=np.bool_)
    disagreeing = []
    first = order[0] if order else 0
    for one, other in itertools.pairwise(order):
        length = _common_tokens(prompts[one], prompts[other])
        common[one], common[other] = max(common[one], length), max(common[other], length)
        if prompts[one] != prompts[other]:
            first = other
            continue
        repeated[one] = repeated[other] = True
        if _disagree(columns, first, other):
            disagreeing.append((first, other))
    shares = common >= _LONG_PREFIX
    return Sharing(
        sharing=int(np.count_nonzero(shares)),
        longest=int(common.max(initial=0)) if shares.any() else 0,
        repeated=int(np.count_nonzero(repeated)),
        disagreeing=tuple(disagreeing),
    )


def _common_tokens(one: bytes, other: bytes) -> int:
    length = min(len(one), len(other))
    a, b = np.frombuffer(one, dtype=">i4", count=length // 4), np.frombuffer(other, ">i4", count=length // 4)
    differs = np.flatnonzero(a != b)
    return int(differs[0]) if len(differs) else length // 4


def _disagree(columns: HelperColumns, one: int, other: int) -> bool:
    """Whether two requests with one prompt, and one amount of cached tokens, decoded differently."""
    if columns.cached_generation[one] != columns.cached_generation[other]:
        return False
    a, b = columns.tokens_of(one), columns.tokens_of(other)
    count = min(a.stop - a.start, b.stop - b.start)
    if not count:
        return False
    a, b = slice(a.start, a.start + count), slice(b.start, b.start + count)
    same_tokens = np.array_equal(columns.token_id[a], columns.token_id[b])
    decode, lost = columns.decode_nats.view(np.uint32), int(columns.lost[one] | columns.lost[other])
    return not (same_tokens and np.array_equal(decode[a][lost:], decode[b][lost:]))
