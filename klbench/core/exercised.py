"""What a run puts to the test at all: hits, batches, CUDA graphs, the model's window, chunks, checkpoints.

    what_will_be_exercised([268, 301, ...], server, max_new_tokens=128, helpers=HELPERS)    # before a run
    what_was_exercised(columns, server)                                                     # after it

A result says nothing about what it did not exercise, so what will be missed is said before a run, and what
was stands beside its verdict, with what would exercise it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.core.columns import HELPERS, HelperColumns, HelperName
from klbench.core.verdict_words import NOT_EXERCISED

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Exercised:
    """One thing that was or was not exercised; `advice` says how it would be."""

    code: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)
    advice: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Lengths:
    """Of all compared requests, [n] each, in tokens."""

    prompt: Ints
    total: Ints


def what_was_exercised(
    columns: Mapping[HelperName, HelperColumns], server: Mapping[str, Any], *, graphs_tried: bool = False
) -> list[Exercised]:
    """What the run's requests reached, from their lengths, their hits and the server's settings.

    `graphs_tried`: whether the experiment that switches CUDA graphs was made.
    """
    parts = [columns[helper] for helper in HELPERS if helper in columns and len(columns[helper].token_id)]
    if not parts:
        return []
    compared = [part.requests_compared for part in parts]
    lengths = _Lengths(
        np.concatenate([part.prompt_len[kept] for part, kept in zip(parts, compared, strict=True)]),
        np.concatenate(
            [(part.prompt_len + part.output_len)[kept] for part, kept in zip(parts, compared, strict=True)]
        ),
    )
    found = _of_lengths(lengths, server, "was not")
    found += [_hits(part, kept) for part, kept in zip(parts, compared, strict=True)]
    found += _batches(max(int(np.count_nonzero(kept)) for kept in compared), "was not")
    return found + _graphs(server, "was not", tried=graphs_tried)


def what_will_be_exercised(
    prompt_lengths: Sequence[int],
    server: Mapping[str, Any],
    *,
    max_new_tokens: int,
    helpers: Collection[str],
) -> list[Exercised]:
    """The same before a run of `helpers`, from the lengths of the prompts in tokens."""
    if not prompt_lengths or not helpers:
        return []
    prompt = np.array(prompt_lengths, dtype=np.int64)
    # decode_cache_hit compares its second turn: the first with what it generated, and a ",".
    turns = [prompt] if set(helpers) - {"decode_cache_hit"} else []
    turns += [prompt + max_new_tokens + 1] if "decode_cache_hit" in helpers else []
    compared = np.concatenate(turns)
    found = _of_lengths(_Lengths(compared, compared + max_new_tokens), server, "will not be")
    found += _batches(len(prompt_lengths), "will not be")
    found += _graphs(server, "will not be")
    # Nobody expects match to hit the cache.
    if server.get("radix_cache") is False and set(helpers) - {"match"}:
        found.append(
            Exercised(
                "no_restore",
                "the radix cache is off: no restore will be tested",
                {},
                "start the server with an attention backend that keeps the radix cache",
            )
        )
    page = server.get("page_size")
    if isinstance(page, int) and page > 1 and "prefill_cache_hit" in helpers:
        short = int(np.count_nonzero(prompt <= page))
        if short:
            found.append(
                Exercised(
                    "page_not_filled",
                    f"{short} of {len(prompt)} prompts fill no page of {page} tokens before their last "
                    "token: prefill_cache_hit can restore nothing of them",
                    {"page_size": page, "requests": short},
                    f"use longer prompts: --prompt-tokens {4 * page}",
                )
            )
    return found


def what_will_be_missed(
    prompt_lengths: Sequence[int],
    server: Mapping[str, Any],
    *,
    max_new_tokens: int,
    helpers: Collection[str],
) -> list[Exercised]:
    """What a run of `helpers` will not put to the test, of what `what_will_be_exercised` knows."""
    known = what_will_be_exercised(prompt_lengths, server, max_new_tokens=max_new_tokens, helpers=helpers)
    return [item for item in known if item.code in NOT_EXERCISED]


def _of_lengths(lengths: _Lengths, server: Mapping[str, Any], tense: str) -> list[Exercised]:
    found = []
    if (window := _setting(server, "sliding_window")) is not None:
        found.append(_window(window, lengths, tense))
    if (chunk := _setting(server, "chunked_prefill_size")) is not None:
        found.append(_chunk(chunk, lengths))
    if (interval := _setting(server, "checkpoint_interval")) is not None:
        found.append(_checkpoints(interval, lengths, tense))
    return found


def _setting(server: Mapping[str, Any], name: str) -> int | None:
    value = server.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _window(window: int, lengths: _Lengths, tense: str) -> Exercised:
    crossed = int(np.count_nonzero(lengths.total > window))
    if not crossed:
        tokens = 2 * window
        return Exercised(
            "window_not_crossed",
            f"no request is longer than the sliding window of {window} tokens: its handover {tense} tested",
            {"window": window, "longest": int(lengths.total.max()), "prompt_tokens": tokens},
            f"use longer prompts: --prompt-tokens {tokens}",
        )
    in_decode = int(np.count_nonzero((lengths.prompt <= window) & (lengths.total > window)))
    return Exercised(
        "window_crossed",
        f"{crossed} of {len(lengths.total)} requests are longer than the sliding window of {window} tokens, "
        f"{in_decode} cross it while decoding",
        {
            "window": window,
            "crossed": crossed,
            "in_decode": in_decode,
            "prompt_tokens_in_decode": max(1, window - 8),
        },
    )


def _chunk(chunk: int, lengths: _Lengths) -> Exercised:
    # A chunk is filled by all requests of a prefill together, so many short ones are cut, too.
    longest = int(lengths.total.max())
    if longest > chunk:
        return Exercised(
            "chunk_crossed",
            f"the longest request ({longest} tokens) is longer than a prefill chunk of {chunk}",
            {"chunk": chunk, "longest": longest},
        )
    return Exercised(
        "chunk_within_request",
        f"no request is longer than a prefill chunk of {chunk} tokens; one can only be cut because others "
        f"share its prefill (prompts of {2 * chunk} tokens, or --chunked-prefill-size "
        f"{max(1, longest // 4)}, "
        "would be cut)",
        {
            "chunk": chunk,
            "longest": longest,
            "longest_prompt": int(lengths.prompt.max()),
            "total": int(lengths.total.sum()),
            "prompt_tokens": 2 * chunk,
        },
    )


def _checkpoints(interval: int, lengths: _Lengths, tense: str) -> Exercised:
    crossed = int(np.count_nonzero((lengths.total - 1) // interval > (lengths.prompt - 1) // interval))
    if crossed:
        return Exercised(
            "checkpoint_crossed",
            f"{crossed} of {len(lengths.total)} requests pass a checkpoint (every {interval} tokens) while "
            "decoding",
            {"interval": interval, "crossed": crossed},
        )
    return Exercised(
        "checkpoint_not_crossed",
        f"no request passes a checkpoint of its state (every {interval} tokens) while decoding: writing "
        "one in "
        f"decode {tense} tested",
        {"interval": interval, "max_new_tokens": interval},
        f"generate more: --max-new-tokens {interval}",
    )


def _hits(part: HelperColumns, compared: npt.NDArray[np.bool_]) -> Exercised:
    cached = part.cached_generation[compared]
    hits = int(np.count_nonzero(cached))
    values: dict[str, Any] = {"helper": part.helper, "hits": hits, "requests": len(cached)}
    if not hits:
        text = f"{part.helper}: all {len(cached)} requests are cold, no restore was tested"
        return Exercised("cold", text, values)
    restored = cached[cached > 0]
    rows = (part.prompt_len - part.cached_generation)[compared][cached > 0]
    values |= {
        "restored_tokens": [int(restored.min()), int(restored.max())],
        "extend_rows": [int(rows.min()), int(rows.max())],
    }
    text = (
        f"{part.helper}: {hits} of {len(cached)} compared requests restored {_span(restored)} tokens and "
        f"extended them by {_span(rows)}"
    )
    return Exercised("restored", text, values)


def _span(values: Ints) -> str:
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low} to {high}"


def _batches(requests: int, tense: str) -> list[Exercised]:
    if requests > 1:
        return []
    return [
        Exercised(
            "no_batch",
            f"one request decodes alone, with one row: that others share its forward {tense} tested",
            {"requests": requests},
            "use more requests: --samples 32",
        )
    ]


def _graphs(server: Mapping[str, Any], tense: str, *, tried: bool = False) -> list[Exercised]:
    """A CPU replays no graphs, so nothing is missed there; a server may not say whether it does."""
    if server.get("cuda_graphs") is not False or server.get("device") in (None, "cpu"):
        return []
    values = {"cuda_graphs": False, "experiment": tried}
    if tried:
        text = "CUDA graphs are off except in the experiment graphs: only its helper was tested with them"
        return [Exercised("no_graphs", text, values)]
    return [
        Exercised(
            "no_graphs",
            f"CUDA graphs are off: a divergence that lives only in their replay {tense} tested",
            values,
            "measure with CUDA graphs on: the experiment graphs, or --no-ready-to-capture and no flag of "
            "sglang's that switches them off",
        )
    ]
