"""What a run put to the test at all: cache hits, the model's window, chunked prefill.

A result says nothing about what it did not exercise, so this stands beside every verdict, with the lengths
that would exercise it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from klbench.core.columns import HelperColumns, HelperName


@dataclass(frozen=True, slots=True)
class Exercised:
    """One thing that was or was not exercised; `advice` says how it would be."""

    code: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)
    advice: str | None = None


def what_was_exercised(
    columns: Mapping[HelperName, HelperColumns], server: Mapping[str, Any]
) -> list[Exercised]:
    """What the run's requests reached, from their lengths and the server's settings."""
    parts = [part for part in columns.values() if len(part.token_id)]
    if not parts:
        return []
    lengths = np.concatenate([(part.prompt_len + part.output_len)[~part.dropped] for part in parts])
    longest_prompt = max(int(part.prompt_len.max()) for part in parts)
    found = []
    window = server.get("sliding_window")
    if isinstance(window, int) and window > 0:
        found.append(_window(window, lengths, [part for part in parts if part.requests]))
    chunk = server.get("chunked_prefill_size")
    if isinstance(chunk, int) and chunk > 0:
        found.append(_chunk(chunk, lengths, longest_prompt))
    return found


def _window(
    window: int, lengths: np.ndarray[Any, np.dtype[np.int64]], parts: list[HelperColumns]
) -> Exercised:
    crossed = int(np.count_nonzero(lengths > window))
    if not crossed:
        tokens = 2 * window
        return Exercised(
            "window_not_crossed",
            f"no request is longer than the sliding window of {window} tokens: its handover was not tested",
            {"window": window, "longest": int(lengths.max()), "prompt_tokens": tokens},
            f"use longer prompts: --prompt-tokens {tokens}",
        )
    in_decode = sum(
        int(np.count_nonzero((part.prompt_len <= window) & (part.prompt_len + part.output_len > window)))
        for part in parts
    )
    return Exercised(
        "window_crossed",
        f"{crossed} of {len(lengths)} requests are longer than the sliding window of {window} tokens, "
        f"{in_decode} cross it while decoding",
        {"window": window, "crossed": crossed, "in_decode": in_decode},
    )


def _chunk(chunk: int, lengths: np.ndarray[Any, np.dtype[np.int64]], longest_prompt: int) -> Exercised:
    # A chunk is filled by all requests of a prefill together, so many short ones are cut, too.
    total = int(lengths.sum())
    if int(lengths.max()) > chunk:
        return Exercised(
            "chunk_crossed",
            f"the longest request ({int(lengths.max())} tokens) is longer than a prefill chunk of {chunk}",
            {"chunk": chunk, "longest": int(lengths.max())},
        )
    return Exercised(
        "chunk_within_request",
        f"no request is longer than a prefill chunk of {chunk} tokens; one can only be cut because others "
        "share its prefill",
        {"chunk": chunk, "longest": int(lengths.max()), "longest_prompt": longest_prompt, "total": total},
    )
