"""The row digest of `insitu/digest.py` in numpy: the definition that tests hold the other one to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Lanes = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_SEEDS = (np.uint64(0x243F6A8885A308D3), np.uint64(0x13198A2E03707344), np.uint64(0xA4093822299F31D0))


def _mixed(x: Lanes) -> Lanes:
    """splitmix64's finaliser: a bijection of 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    return x ^ (x >> np.uint64(31))


def digest_rows(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The digests of byte rows [n, row bytes]: uint64 [n, 2], low and high.

    Each 64-bit lane x at position i with keys k, a, b of that position: y = x ^ k; y = (y ^ y >> 32) * a;
    y ^= y >> 29, which is summed to `low`; y = y * b; y ^= y >> 32, which is summed to `high`; all modulo
    2^64. Then low = mix(low + bytes * golden), high = mix(high ^ low) + low.
    """
    count, row_bytes = rows.shape
    padded = np.zeros((count, row_bytes + -row_bytes % 8), dtype=np.uint8)
    padded[:, :row_bytes] = rows
    lanes = padded.view("<u8").astype(np.uint64)
    counter = (np.arange(lanes.shape[1], dtype=np.uint64) + np.uint64(1)) * _GOLDEN
    keys = _mixed(counter + _SEEDS[0])
    times_low, times_high = (_mixed(counter + seed) | np.uint64(1) for seed in _SEEDS[1:])
    y = lanes ^ keys
    y = (y ^ (y >> np.uint64(32))) * times_low
    y = y ^ (y >> np.uint64(29))
    low = y.sum(axis=1, dtype=np.uint64)
    y = y * times_high
    high = (y ^ (y >> np.uint64(32))).sum(axis=1, dtype=np.uint64)
    low = _mixed(low + np.uint64(row_bytes) * np.full(count, _GOLDEN))
    high = _mixed(high ^ low) + low
    return np.stack([low, high], axis=1)
