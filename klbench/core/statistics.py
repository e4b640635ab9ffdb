"""How the differences of one helper are distributed; what an average hides.

    >>> numbers = statistics(columns)
    >>> numbers.mean_nats, numbers.interval_nats, numbers.percentiles_nats["99.9"]

k3 is sglang's (kl.py). Requests are the unit that is drawn again for the interval, because the tokens of one
request are not independent. Invariants: the same columns give the same numbers, bit for bit; tokens whose
logprob is no finite number are counted, never averaged; nothing compared gives None, never 0. A token whose
logprob was lost is in no number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.core.columns import HelperColumns
from klbench.core.kl import HelperSummary, divergent, summarise, token_k3
from klbench.core.thresholds import USUAL_REQUESTS, USUAL_TOKENS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PERCENTILES = ("50", "90", "99", "99.9")
_SEED = 20240613
_RESAMPLES = 2000
_LEVEL = 0.95
_DRAWN_AT_ONCE = 1 << 21
HISTOGRAM_DECADES = tuple(range(-9, 1))


@dataclass(frozen=True, slots=True, eq=False)
class PerOffset:
    """Columns over the offsets of the generation, all [longest output]."""

    tokens: Ints
    divergent: Ints
    mean_k3_nats: Floats
    """NaN where no token with finite logprobs has that offset."""
    max_abs_nats: Floats


@dataclass(frozen=True, slots=True)
class Bin:
    """Tokens whose absolute difference in nats lies in [low, high); `high` None means no upper end."""

    low_nats: float
    high_nats: float | None
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """The numbers of one helper. Percentiles are of |difference| over all finite tokens, equal ones too."""

    requests: int
    tokens: int
    divergent_tokens: int
    nan_count: int
    bit_equal_fraction: float | None
    mean_nats: float | None
    interval_nats: tuple[float, float] | None
    """Bootstrap interval of the mean at `level`; None with fewer than two comparable requests."""
    level: float
    median_request_nats: float | None
    max_abs_nats: float | None
    fraction_past: dict[str, float]
    percentiles_nats: dict[str, float]
    request_kl_nats: Floats
    per_offset: PerOffset
    histogram: tuple[Bin, ...]
    """Equal tokens first, then one bin a decade; tokens without a finite difference are in none."""
    warning: str | None

    def as_dict(self) -> dict[str, Any]:
        """For documents: everything but the long columns."""
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "divergent_tokens": self.divergent_tokens,
            "nan_count": self.nan_count,
            "bit_equal_fraction": self.bit_equal_fraction,
            "avg_kl_div": self.mean_nats,
            "interval_nats": None if self.interval_nats is None else list(self.interval_nats),
            "level": self.level,
            "median_request_nats": self.median_request_nats,
            "max_abs_dlogprob": self.max_abs_nats,
            "fraction_past": dict(self.fraction_past),
            "percentiles_nats": dict(self.percentiles_nats),
            "histogram": [
                {"low_nats": part.low_nats, "high_nats": part.high_nats, "tokens": part.tokens}
                for part in self.histogram
            ],
            "warning": self.warning,
        }


def statistics(
    columns: HelperColumns,
    summary: HelperSummary | None = None,
    *,
    resamples: int = _RESAMPLES,
    seed: int = _SEED,
) -> Statistics:
    """The distribution of one helper's differences."""
    summary = summary or summarise(columns)
    difference = absolute_difference(columns)
    finite = difference[np.isfinite(difference)]
    comparable = summary.kl_nats[~np.isnan(summary.kl_nats)]
    return Statistics(
        requests=summary.requests,
        tokens=summary.tokens,
        divergent_tokens=summary.divergent,
        nan_count=summary.nan_count,
        bit_equal_fraction=summary.bit_equal_fraction,
        mean_nats=summary.avg_kl_nats,
        interval_nats=bootstrap_interval(comparable, resamples=resamples, seed=seed),
        level=_LEVEL,
        median_request_nats=float(np.median(comparable)) if len(comparable) else None,
        max_abs_nats=float(finite.max()) if len(finite) else None,
        fraction_past=dict(summary.fraction_past) if summary.tokens else {},
        percentiles_nats=(
            dict(
                zip(PERCENTILES, np.percentile(finite, [float(p) for p in PERCENTILES]).tolist(), strict=True)
            )
            if len(finite)
            else {}
        ),
        request_kl_nats=summary.kl_nats,
        per_offset=per_offset(columns),
        histogram=histogram(finite),
        warning=sample_warning(columns),
    )


def absolute_difference(columns: HelperColumns) -> Floats:
    """[T] |prefill - decode| in nats, NaN where one of them is no finite number or was lost."""
    with np.errstate(invalid="ignore"):
        difference = columns.prefill_nats.astype(np.float64) - columns.decode_nats.astype(np.float64)
    difference[~(np.isfinite(difference) & columns.compared)] = np.nan
    return np.abs(difference)


def bootstrap_interval(
    request_kl_nats: Floats, *, resamples: int = _RESAMPLES, seed: int = _SEED
) -> tuple[float, float] | None:
    """Percentile bootstrap of the mean over requests (Efron, 1979); None with fewer than two requests."""
    count = len(request_kl_nats)
    if count < 2:
        return None
    random = np.random.default_rng(seed)
    means = np.empty(resamples)
    step = max(1, _DRAWN_AT_ONCE // count)
    for start in range(0, resamples, step):
        stop = min(resamples, start + step)
        means[start:stop] = request_kl_nats[random.integers(0, count, (stop - start, count))].mean(axis=1)
    low, high = np.quantile(means, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


def per_offset(columns: HelperColumns) -> PerOffset:
    """Where in the generation the differences lie, over all compared requests."""
    counts = np.diff(columns.start)
    offset = np.arange(len(columns.token_id)) - np.repeat(columns.start[:-1], counts)
    longest = int(counts.max(initial=0))
    difference = absolute_difference(columns)
    finite = np.isfinite(difference)
    k3 = np.zeros(len(difference))
    k3[finite] = token_k3(columns.prefill_nats[finite], columns.decode_nats[finite])
    comparable = np.bincount(offset[finite], minlength=longest)
    total = np.bincount(offset, weights=k3, minlength=longest)
    largest = np.zeros(longest)
    np.maximum.at(largest, offset[finite], difference[finite])
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(comparable > 0, total / comparable, np.nan)
    return PerOffset(
        tokens=np.bincount(offset[columns.compared], minlength=longest).astype(np.int64),
        divergent=np.bincount(offset[divergent(columns)], minlength=longest).astype(np.int64),
        mean_k3_nats=mean,
        max_abs_nats=largest,
    )


def histogram(difference: Floats) -> tuple[Bin, ...]:
    """How many tokens are exactly equal, below 1e-9, and in each decade up to and past 1 nat."""
    edges = [10.0**decade for decade in HISTOGRAM_DECADES]
    nonzero = difference[difference > 0]
    place = np.searchsorted(edges, nonzero, side="right")
    counts = np.bincount(place, minlength=len(edges) + 1)
    bins = [Bin(0.0, 0.0, int(len(difference) - len(nonzero))), Bin(0.0, edges[0], int(counts[0]))]
    ends: list[float | None] = [*edges[1:], None]
    bins += [Bin(low, high, int(n)) for low, high, n in zip(edges, ends, counts[1:], strict=True)]
    return tuple(bins)


def sample_warning(columns: HelperColumns) -> str | None:
    """What a measurement smaller than sglang's own must say of itself."""
    requests = int(np.count_nonzero(columns.tokens_compared))
    longest = int(columns.output_len.max(initial=0))
    if not requests or (requests >= USUAL_REQUESTS and longest >= USUAL_TOKENS):
        return None
    return (
        f"{requests} requests of at most {longest} tokens; sglang measures {USUAL_REQUESTS} of "
        f"{USUAL_TOKENS}, "
        "and fewer can miss a rare divergence"
    )
