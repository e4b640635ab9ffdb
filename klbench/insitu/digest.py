"""The 128-bit digest of a row: exact integer arithmetic over its raw bits, the same wherever it is computed.

A row is its bytes, padded with zeros to 64-bit lanes. Each lane is mixed with keys of its position by
bijections, so a changed lane always changes both sums; the two sums wrap around, so no order of adding can be
seen; the finaliser takes the length in. Nothing depends on device, batch, dtype or place in the batch, and
rows that are permuted, duplicated, sign-flipped, zeroed or cut differ. Not cryptographic: rows are not chosen
against it.

`klbench/core/digests.py` computes the same in numpy; a test holds the two together.
"""

from typing import Dict, Tuple

import torch

_MASK_64 = (1 << 64) - 1
_LANE_LIMIT = 1 << 21
"""Lanes mixed at a time: bounds the temporary memory to some 50 MB."""

GOLDEN = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
SEED_KEY = 0x243F6A8885A308D3
SEED_LOW = 0x13198A2E03707344
SEED_HIGH = 0xA4093822299F31D0

_keys: Dict[Tuple[str, int], Tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}


def _signed(value: int) -> int:
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift: int64 shifts in its sign, which is masked away."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser: a bijection of 64 bits."""
    x = (x ^ _shifted(x, 30)) * _signed(MIX_A)
    x = (x ^ _shifted(x, 27)) * _signed(MIX_B)
    return x ^ _shifted(x, 31)


def _lane_keys(lanes: int, device: torch.device) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each lane position: what is xored in, and two odd multipliers."""
    # A power of two at least, so that a few tables serve all widths.
    size = 1 << max(6, (lanes - 1).bit_length())
    known = _keys.get((str(device), size))
    if known is None:
        counter = (torch.arange(size, dtype=torch.int64, device=device) + 1) * _signed(GOLDEN)
        known = (
            _mixed(counter + _signed(SEED_KEY)),
            _mixed(counter + _signed(SEED_LOW)) | 1,
            _mixed(counter + _signed(SEED_HIGH)) | 1,
        )
        _keys[(str(device), size)] = known
    return known[0][:lanes], known[1][:lanes], known[2][:lanes]


def as_lanes(tensor: torch.Tensor, rows: int) -> Tuple[torch.Tensor, int]:
    """The tensor's bytes as int64 [rows, lanes] and the bytes of a row. `rows` must divide its elements."""
    flat = tensor.detach().reshape(rows, -1) if tensor.numel() else tensor.new_empty((rows, 0))
    data = flat.contiguous().view(torch.uint8) if flat.shape[1] else flat.new_empty((rows, 0)).byte()
    row_bytes = data.shape[1]
    missing = -row_bytes % 8
    if missing:
        data = torch.cat([data, data.new_zeros((rows, missing))], dim=1)
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    return data.view(torch.int64) if data.shape[1] else data.new_empty((rows, 0)).long(), row_bytes


def digest_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The digests of `tensor` seen as `rows` equal rows in memory order: int64 [rows, 2], low and high."""
    lanes, row_bytes = as_lanes(tensor, rows)
    width = lanes.shape[1]
    low = lanes.new_zeros(rows)
    high = lanes.new_zeros(rows)
    if width:
        keys, times_low, times_high = _lane_keys(width, lanes.device)
        for first in range(0, width, _LANE_LIMIT):
            columns = slice(first, first + _LANE_LIMIT)
            step = max(1, _LANE_LIMIT // min(width, _LANE_LIMIT))
            for top in range(0, rows, step):
                block = slice(top, top + step)
                x = lanes[block, columns] ^ keys[columns]
                x = (x ^ _shifted(x, 32)) * times_low[columns]
                x = x ^ _shifted(x, 29)
                low[block] += x.sum(dim=1)
                x = x * times_high[columns]
                x = x ^ _shifted(x, 32)
                high[block] += x.sum(dim=1)
    low = _mixed(low + _signed(row_bytes * GOLDEN))
    high = _mixed(high ^ low) + low
    return torch.stack([low, high], dim=1)
