"""The arithmetic of the three helpers, bit for bit sglang's kl_test_utils, and the tail that a mean hides.

Per token k3 = exp(r) - 1 - r with r = prefill logprob - decode logprob of the sampled token, in float64 nats;
`np.mean` over a request's tokens; Python's sum over the requests that were not dropped, divided by their
count. (k3 estimates the KL divergence and is not negative but for rounding: Schulman, "Approximating KL
divergence".)

Invariants: a token whose two logprobs are not the same float32 bits is divergent; NaN and infinities are
divergent, counted and named, never averaged; what was not compared never looks clean. A token whose decode
logprob the server lost is not compared: it is in no number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.core.columns import HelperColumns, HelperName
from klbench.core.text import counted
from klbench.core.thresholds import BIT_EQUAL_NATS, FRACTIONS_PAST, MIN_HIT_FRACTION

_NAMED = 8
"""So many requests are named in a sentence."""


@dataclass(frozen=True, slots=True, eq=False)
class HelperSummary:
    """Per-request and overall numbers of one helper; per-request arrays are [N].

    `kl_nats` is NaN where nothing finite was compared (dropped requests, non-finite logprobs);
    `first_offset` is -1 where no token diverges; `hit` says whether the request restored a cached prefix.
    """

    helper: HelperName
    kl_nats: npt.NDArray[np.float64]
    divergent_tokens: npt.NDArray[np.int64]
    first_offset: npt.NDArray[np.int64]
    max_abs_dlogprob: npt.NDArray[np.float64]
    hit: npt.NDArray[np.bool_]
    dropped: npt.NDArray[np.bool_]
    nan_requests: npt.NDArray[np.int64]
    """[n] the requests with a logprob that is no number."""
    nan_count: int
    tokens: int
    avg_kl_nats: float | None
    bit_equal_fraction: float | None
    fraction_past: dict[str, float]

    @property
    def requests(self) -> int:
        return len(self.kl_nats)

    @property
    def divergent(self) -> int:
        return int(self.divergent_tokens.sum())


def divergent(columns: HelperColumns) -> npt.NDArray[np.bool_]:
    """[T] whether a token's two logprobs differ in their bits, or one of them is no number. A token that was
    not compared does not."""
    decode, prefill = columns.decode_nats, columns.prefill_nats
    differs: npt.NDArray[np.bool_] = decode.view(np.uint32) != prefill.view(np.uint32)
    differs |= ~(np.isfinite(decode) & np.isfinite(prefill))
    differs &= columns.compared
    return differs


def not_finite(columns: HelperColumns) -> npt.NDArray[np.bool_]:
    """[T] whether a token was compared and one of its logprobs is no finite number."""
    found: npt.NDArray[np.bool_] = columns.compared & ~(
        np.isfinite(columns.decode_nats) & np.isfinite(columns.prefill_nats)
    )
    return found


def token_k3(prefill_nats: npt.NDArray[np.float32], decode_nats: npt.NDArray[np.float32]) -> Any:
    """[T] k3 in float64 nats of each token."""
    logr = prefill_nats.astype(np.float64) - decode_nats.astype(np.float64)
    return (np.exp(logr) - 1) - logr


def summarise(columns: HelperColumns) -> HelperSummary:
    """The numbers of one helper."""
    requests, tokens = columns.requests, int(columns.tokens_compared.sum())
    dirty, endless = divergent(columns), not_finite(columns)
    usable = columns.compared & ~endless
    kl = np.full(requests, np.nan)
    count = np.zeros(requests, dtype=np.int64)
    first = np.full(requests, -1, dtype=np.int64)
    largest = np.zeros(requests)
    difference = np.zeros(len(columns.token_id))
    np.subtract(columns.prefill_nats, columns.decode_nats, out=difference, where=usable, dtype=np.float64)
    np.abs(difference, out=difference)
    means = []
    for request in range(requests):
        part = columns.compared_of(request)
        if part.start == part.stop:
            continue
        count[request] = np.count_nonzero(dirty[part])
        if count[request]:
            first[request] = int(dirty[columns.tokens_of(request)].argmax())
        largest[request] = difference[part].max()
        if usable[part].all():
            # A fresh array for each request, as kl_test_utils has it: the same calls give the same bits.
            mean = np.mean(token_k3(columns.prefill_nats[part], columns.decode_nats[part]))
            kl[request] = mean
            means.append(mean)
    nan_count = int(np.count_nonzero(endless))
    owner = np.repeat(np.arange(requests), np.diff(columns.start))
    return HelperSummary(
        helper=columns.helper,
        kl_nats=kl,
        divergent_tokens=count,
        first_offset=first,
        max_abs_dlogprob=largest,
        hit=columns.cached_generation > 0,
        dropped=columns.dropped.copy(),
        nan_requests=np.unique(owner[endless]),
        nan_count=nan_count,
        tokens=tokens,
        avg_kl_nats=float(sum(means) / len(means)) if means and not nan_count else None,
        bit_equal_fraction=1.0 - float(np.count_nonzero(dirty)) / tokens if tokens else None,
        fraction_past={
            name: float(np.count_nonzero((difference > nats) | endless)) / tokens if tokens else 0.0
            for name, nats in FRACTIONS_PAST
        },
    )


def helper_result(
    columns: HelperColumns,
    *,
    threshold_nats: float = BIT_EQUAL_NATS,
    max_new_tokens: int | None = None,
    page_size: int | None = None,
    summary: HelperSummary | None = None,
) -> dict[str, Any]:
    """The helper's object of klbench.run/1. With `max_new_tokens` it says which requests ended early."""
    summary = summary or summarise(columns)
    status, reasons = _status(columns, summary, threshold_nats, page_size)
    if max_new_tokens is not None:
        early = np.flatnonzero(columns.output_len < max_new_tokens)
        if len(early):
            reasons.append(
                f"{counted(len(early), 'request')} ended before {max_new_tokens} tokens, first request "
                f"{early[0]} with {columns.output_len[early[0]]}"
            )
    compared = summary.tokens > 0
    hits = _hits(columns, summary)
    lost = {"lost": np.flatnonzero(columns.lost).tolist()} if columns.lost.any() else {}
    return {
        "status": status,
        "reason": "; ".join(reasons) or None,
        "requests": summary.requests,
        "hits": hits,
        "dropped": int(np.count_nonzero(summary.dropped)),
        "tokens": summary.tokens,
        "avg_kl_div": summary.avg_kl_nats,
        "threshold": threshold_nats,
        "max_abs_dlogprob": float(summary.max_abs_dlogprob.max()) if compared else None,
        "divergent_tokens": summary.divergent,
        "bit_equal_fraction": summary.bit_equal_fraction,
        "fraction_past": dict(summary.fraction_past) if compared else None,
        "nan_count": summary.nan_count,
        "requests_detail": [_detail(columns, summary, request) for request in range(summary.requests)],
        **lost,
    }


def not_measured(
    helper_status: str, reason: str, *, requests: int, threshold_nats: float = BIT_EQUAL_NATS
) -> dict[str, Any]:
    """The object of a helper without numbers: `not_run` or `error`, with its reason; never zeros."""
    return {
        "status": helper_status,
        "reason": reason,
        "requests": requests,
        "hits": None,
        "dropped": None,
        "tokens": 0,
        "avg_kl_div": None,
        "threshold": threshold_nats,
        "max_abs_dlogprob": None,
        "divergent_tokens": None,
        "bit_equal_fraction": None,
        "fraction_past": None,
        "nan_count": None,
        "requests_detail": [],
    }


def _hits(columns: HelperColumns, summary: HelperSummary) -> int:
    """How many requests restored what the helper is about."""
    hit = summary.hit if columns.helper == "match" else ~summary.dropped
    return int(np.count_nonzero(hit))


def _status(
    columns: HelperColumns, summary: HelperSummary, threshold_nats: float, page_size: int | None
) -> tuple[str, list[str]]:
    hits, requests = _hits(columns, summary), summary.requests
    reasons = []
    if summary.nan_count:
        request = int(summary.nan_requests[0])
        offset = int(not_finite(columns)[columns.tokens_of(request)].argmax())
        reasons.append(
            f"{counted(summary.nan_count, 'token has', 'tokens have')} a logprob that is no finite number, "
            f"first request {request}, offset {offset}, position "
            f"{int(columns.prompt_len[request]) + offset}; no mean is given"
        )
    if columns.lost.any():
        reasons.append(_lost_words(columns))
    if columns.helper != "match" and hits == 0:
        return "not_run", [f"0 of {requests} requests hit the cache: {_no_hit_reason(columns, page_size)}"]
    few = columns.helper != "match" and hits <= MIN_HIT_FRACTION * requests
    if few:
        why = _no_hit_reason(columns, page_size)
        reasons.append(f"only {hits} of {requests} requests hit the cache, more than half are needed: {why}")
    if _is_past(summary, threshold_nats):
        return "diverged", reasons
    if columns.helper == "match" and hits:
        reasons.append(
            f"{hits} of {requests} requests hit the cache, because prompts share a prefix: part of them was "
            "restored, not computed"
        )
    if not summary.tokens:
        return "inconclusive", [*reasons, "no token was compared"]
    return ("inconclusive" if few else "clean"), reasons


def _lost_words(columns: HelperColumns) -> str:
    """Which tokens have no decode logprob, and why."""
    requests = np.flatnonzero(columns.lost)
    named = ", ".join(map(str, requests[:_NAMED])) + (", ..." if len(requests) > _NAMED else "")
    of = "request" if len(requests) == 1 else "each of requests"
    return (
        f"the first token of {of} {named} was not compared: the server lost its logprob, as sglang 0.5.17 "
        "does (0.5.23 does not) when it retracts a request before that token"
    )


def _is_past(summary: HelperSummary, threshold_nats: float) -> bool:
    if threshold_nats <= 0 or summary.avg_kl_nats is None:
        return summary.divergent > 0
    return not summary.avg_kl_nats < threshold_nats


def _no_hit_reason(columns: HelperColumns, page_size: int | None) -> str:
    if page_size is not None and page_size > 1 and int(columns.prompt_len.max()) <= page_size:
        return f"no prompt is longer than a page of {page_size} tokens"
    if columns.helper == "prefill_cache_hit":
        return (
            "no prefix was kept that can be reused (a model with recurrent state keeps a "
            "checkpoint only where a forward of the prompt ends, and the end of a prompt that comes again is "
            "no prefix of it: with --chunked-prefill-size 128 there are more; a full pool evicts)"
        )
    return (
        "the server restored no more than the first turn's prompt (a checkpoint or a window that ends before "
        "the generated tokens; a full pool evicts)"
    )


def _detail(columns: HelperColumns, summary: HelperSummary, request: int) -> dict[str, Any]:
    kl, offset = float(summary.kl_nats[request]), int(summary.first_offset[request])
    prompt_len = int(columns.prompt_len[request])
    return {
        "index": request,
        "prompt_len": prompt_len,
        "cached_tokens": int(columns.cached_generation[request]),
        "output_len": int(columns.output_len[request]),
        "kl": None if np.isnan(kl) else kl,
        "divergent_tokens": int(summary.divergent_tokens[request]),
        "first_divergence": None if offset < 0 else {"offset": offset, "position": prompt_len + offset},
        "dropped": bool(summary.dropped[request]),
        "max_abs_dlogprob": None if summary.dropped[request] else float(summary.max_abs_dlogprob[request]),
    }
