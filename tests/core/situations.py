"""Runs made to the signature of known faults: 32 requests of 48 tokens in each of the three helpers.

`Run().helper("match", differ)` gives columns where request i's tokens differ as `differ(request)` says: an
array of differences in nats by offset, or None for a clean request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from klbench.core.columns import HelperColumns, HelperName
from klbench.core.kl import helper_result, not_measured

REQUESTS, TOKENS = 32, 48
SERVER: dict[str, Any] = {
    "deterministic": True,
    "radix_cache": True,
    "page_size": 1,
    "chunked_prefill_size": 8192,
    "sliding_window": None,
    "device": "cuda",
    "overlap": True,
    "cuda_graphs": True,
    "dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "architectures": ["Qwen3ForCausalLM"],
}


@dataclass(frozen=True)
class Request:
    """What a difference may depend on. `cached` and `prompt_len` are those of the generation arm."""

    index: int
    prompt_len: int
    cached: int

    @property
    def hit(self) -> bool:
        return self.cached > 0


Differ = Callable[[Request], "np.ndarray[Any, Any] | None"]


def clean(_: Request) -> None:
    return None


def noise(size: float, *, first: int = 1, share: float = 0.6, seed: int = 7) -> Differ:
    """Differences of about `size` from offset `first` on, at `share` of the tokens, as rounding does."""

    def differ(request: Request) -> np.ndarray[Any, Any]:
        random = np.random.default_rng([seed, request.index, request.cached])
        values = random.normal(0, size, TOKENS) * (random.random(TOKENS) < share)
        values[:first] = 0.0
        values[first] = size
        return values

    return differ


def from_offset(first: int, size: float) -> Differ:
    """All tokens from offset `first` on differ by about `size`."""
    return noise(size, first=first, share=1.0)


def from_position(position: int, size: float, first: int = 1) -> Differ:
    """Differs from an absolute token position on, at the earliest from offset `first`."""

    def differ(request: Request) -> np.ndarray[Any, Any] | None:
        offset = max(first, position - request.prompt_len)
        return from_offset(offset, size)(request) if offset < TOKENS else None

    return differ


def where(condition: Callable[[Request], bool], differ: Differ) -> Differ:
    """`differ` for the requests that meet the condition, the others are clean."""
    return lambda request: differ(request) if condition(request) else None


def on_hits(differ: Differ) -> Differ:
    return where(lambda request: request.hit, differ)


def both(one: Differ, other: Differ) -> Differ:
    """Two faults at once."""

    def differ(request: Request) -> np.ndarray[Any, Any] | None:
        parts = [part for part in (one(request), other(request)) if part is not None]
        return sum(parts[1:], parts[0]) if parts else None

    return differ


@dataclass
class Run:
    """The prompts of a run; `page` and `lose` shape its hits, `shared` gives prompts a common prefix."""

    lengths: Sequence[int] = field(default_factory=lambda: lengths(300))
    page: int = 1
    shared: int = 0
    repeat: bool = False
    extend_rows: Callable[[int], int] = lambda _: 1

    def helper(
        self,
        helper: HelperName,
        differ: Differ = clean,
        *,
        miss: Callable[[int], bool] = lambda _: False,
        nan_at: int | None = None,
    ) -> HelperColumns:
        random = np.random.default_rng(3)
        requests = []
        for index, length in enumerate(self.lengths):
            prompt_len, cached = length, 0
            if helper == "match":
                cached = self.shared if self.shared and index else 0
            elif not miss(index):
                if helper == "decode_cache_hit":
                    prompt_len = length + TOKENS + 1
                cached = (prompt_len - self.extend_rows(index)) // self.page * self.page
            requests.append(Request(index, prompt_len, cached))
        prompts = [random.integers(0, 32000, request.prompt_len) for request in requests]
        for index, prompt in enumerate(prompts):
            if self.repeat and index % 2:
                prompts[index] = prompts[index - 1]
            elif self.shared:
                prompt[: self.shared] = prompts[0][: self.shared]
        dropped = [helper != "match" and not request.hit for request in requests]
        decode, prefill, ids, counts = [], [], [], []
        for request, is_dropped in zip(requests, dropped, strict=True):
            if is_dropped:
                counts.append(0)
                continue
            seed = request.index // 2 if self.repeat else request.index
            base = -np.random.default_rng([11, seed]).exponential(2.0, TOKENS).astype(np.float32)
            difference = differ(request)
            scored = base if difference is None else (base + difference).astype(np.float32)
            if nan_at is not None and request.index == 0:
                scored = scored.copy()
                scored[nan_at] = np.nan
            decode.append(base)
            prefill.append(scored)
            ids.append(np.random.default_rng([13, seed]).integers(0, 32000, TOKENS))
            counts.append(TOKENS)
        return HelperColumns(
            helper=helper,
            prompt_len=np.array([r.prompt_len for r in requests], dtype=np.int64),
            cached_generation=np.array([r.cached for r in requests], dtype=np.int64),
            cached_scoring=np.zeros(len(requests), dtype=np.int64),
            output_len=np.full(len(requests), TOKENS, dtype=np.int64),
            dropped=np.array(dropped),
            start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            token_id=np.concatenate(ids or [np.zeros(0)]).astype(np.int32),
            decode_nats=np.concatenate(decode or [np.zeros(0)]).astype(np.float32),
            prefill_nats=np.concatenate(prefill or [np.zeros(0)]).astype(np.float32),
            prompt_start=np.concatenate([[0], np.cumsum([len(p) for p in prompts])]).astype(np.int64),
            prompt_ids=np.concatenate(prompts).astype(np.int32),
        )

    def three(
        self, match: Differ = clean, prefill: Differ | None = None, decode: Differ | None = None
    ) -> list[HelperColumns]:
        """All three helpers; the hit helpers differ as `match` does unless told."""
        prefill = match if prefill is None else prefill
        return [
            self.helper("match", match),
            self.helper("prefill_cache_hit", prefill),
            self.helper("decode_cache_hit", prefill if decode is None else decode),
        ]


def lengths(middle: int, *, requests: int = REQUESTS, seed: int = 5) -> list[int]:
    """Distinct prompt lengths of 0.5 to 1.5 times `middle`, without an order."""
    random = np.random.default_rng(seed)
    chosen = random.choice(np.arange(middle // 2, middle * 3 // 2), requests, replace=False)
    return [int(length) for length in chosen]


def results_of(columns: Sequence[HelperColumns], **missing: str) -> dict[str, Any]:
    """Results as a run has them; `missing` are helpers without numbers: helper=status."""
    results: dict[str, Any] = {part.helper: helper_result(part) for part in columns}
    for helper, status in missing.items():
        reason = "the radix cache is off" if status == "not_run" else "the server answered 500"
        results[helper] = not_measured(status, reason, requests=REQUESTS)
    return results
