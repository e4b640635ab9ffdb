"""Columns of a helper made from a few lists, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from klbench.core.columns import HelperColumns, HelperName


def make_columns(
    helper: HelperName = "match",
    *,
    prompt_len: Sequence[int],
    decode: Sequence[Sequence[float]],
    prefill: Sequence[Sequence[float]],
    cached: Sequence[int] | None = None,
    dropped: Sequence[bool] | None = None,
) -> HelperColumns:
    """One list of logprobs per request; a dropped request has empty ones."""
    requests = len(prompt_len)
    counts = [len(values) for values in decode]
    flags = list(dropped or [False] * requests)
    return HelperColumns(
        helper=helper,
        prompt_len=np.array(prompt_len, dtype=np.int64),
        cached_generation=np.array(cached or [0] * requests, dtype=np.int64),
        cached_scoring=np.zeros(requests, dtype=np.int64),
        output_len=np.array(counts, dtype=np.int64),
        dropped=np.array(flags, dtype=np.bool_),
        start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        token_id=np.arange(sum(counts), dtype=np.int32),
        decode_nats=np.array([x for values in decode for x in values], dtype=np.float32),
        prefill_nats=np.array([x for values in prefill for x in values], dtype=np.float32),
        prompt_start=np.concatenate([[0], np.cumsum(prompt_len)]).astype(np.int64),
        prompt_ids=np.zeros(sum(prompt_len), dtype=np.int32),
    )


def made_run(
    helper: HelperName,
    first_offset: Sequence[int | None],
    *,
    prompt_len: Sequence[int] | None = None,
    cached: Sequence[int] | None = None,
    tokens: int = 32,
    size_nats: float = 1e-3,
) -> HelperColumns:
    """Request i differs by `size_nats` from offset `first_offset[i]` on, or nowhere."""
    requests = len(first_offset)
    decode = [[-1.0 - 0.01 * t for t in range(tokens)] for _ in range(requests)]
    prefill = [
        [value + (size_nats if first is not None and t >= first else 0.0) for t, value in enumerate(values)]
        for values, first in zip(decode, first_offset, strict=True)
    ]
    # Odd steps, so that no residue is shared by accident.
    lengths = prompt_len or [101 + 37 * i + i * i for i in range(requests)]
    return make_columns(helper, prompt_len=lengths, decode=decode, prefill=prefill, cached=cached)
