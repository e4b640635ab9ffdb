"""The 128-bit digest of a row: exact integer arithmetic over its raw bits, the same wherever it is computed.

A row is its bytes, padded with zeros to 64-bit lanes. Each lane is mixed with keys of its position by
bijections, so a changed lane always changes both sums; the two sums wrap around, so no order of adding can be
seen; the finaliser takes the length in. Nothing depends on device, batch, dtype or place in the batch, and
rows that are permuted, duplicated, sign-flipped, zeroed or cut differ. Not cryptographic: rows are not chosen
against it.

`klbench/core/digests.py` computes the same in numpy; a test holds the two together.
"""

from collections import OrderedDict
from typing import Any, Dict, List, Sequence, Tuple

import torch

_MASK_64 = (1 << 64) - 1
_LANE_LIMIT = 1 << 16
"""Lanes mixed at a time on a CPU: two buffers of 512 KB stay in its cache."""

_DEVICE_LANE_LIMIT = 1 << 22
"""The same elsewhere: few launches, and at most 64 MB of temporary memory."""

_PLANS = 32
_PLAN_LANES = 1 << 18

GOLDEN = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
SEED_KEY = 0x243F6A8885A308D3
SEED_LOW = 0x13198A2E03707344
SEED_HIGH = 0xA4093822299F31D0

_keys: Dict[Tuple[torch.device, int], Tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}


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
    known = _keys.get((device, size))
    if known is None:
        counter = (torch.arange(size, dtype=torch.int64, device=device) + 1) * _signed(GOLDEN)
        known = (
            _mixed(counter + _signed(SEED_KEY)),
            _mixed(counter + _signed(SEED_LOW)) | 1,
            _mixed(counter + _signed(SEED_HIGH)) | 1,
        )
        if device.type == "cuda":
            # Other streams use them from now on.
            current_stream(device).synchronize()
        _keys[(device, size)] = known
    return known[0][:lanes], known[1][:lanes], known[2][:lanes]


def current_stream(device: torch.device) -> Any:
    """The stream on which `device` runs what is called now; None where all runs at once."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def rows_at(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows in `index` of [rows, ...], by their bits: not every device gathers elements of one byte."""
    if tensor.element_size() > 1 or tensor.dtype == torch.uint8:
        return tensor.index_select(0, index)
    return tensor.view(torch.uint8).index_select(0, index).view(tensor.dtype)


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


def _mix(lanes: torch.Tensor, y: torch.Tensor, scratch: torch.Tensor, keys: Sequence[torch.Tensor]) -> None:
    """y = the terms of `low` of `lanes`; y may be lanes, and `scratch` is as large."""
    torch.bitwise_xor(lanes, keys[0], out=y)
    torch.bitwise_right_shift(y, 32, out=scratch)
    y.bitwise_xor_(scratch.bitwise_and_((1 << 32) - 1)).mul_(keys[1])
    torch.bitwise_right_shift(y, 29, out=scratch)
    y.bitwise_xor_(scratch.bitwise_and_((1 << 35) - 1))


def _mix_further(y: torch.Tensor, scratch: torch.Tensor, keys: Sequence[torch.Tensor]) -> None:
    """y = the terms of `high`, from those of `low`, in place."""
    y.mul_(keys[2])
    torch.bitwise_right_shift(y, 32, out=scratch)
    y.bitwise_xor_(scratch.bitwise_and_((1 << 32) - 1))


def row_sums(lanes: torch.Tensor) -> torch.Tensor:
    """The two sums of each row of int64 [rows, lanes], not finished: int64 [2, rows]."""
    rows, width = lanes.shape
    if not rows or not width:
        return lanes.new_zeros((2, rows))
    limit = _LANE_LIMIT if lanes.device.type == "cpu" else _DEVICE_LANE_LIMIT
    keys = _lane_keys(width, lanes.device)
    across = min(width, limit)
    step = min(rows, max(1, limit // across))
    buffer, scratch = lanes.new_empty((step, across)), lanes.new_empty((step, across))
    sums = lanes.new_zeros((2, rows))
    for first in range(0, width, across):
        columns = slice(first, min(first + across, width))
        own = [key[columns] for key in keys]
        for top in range(0, rows, step):
            block = slice(top, min(top + step, rows))
            y = buffer[: block.stop - top, : columns.stop - first]
            z = scratch[: block.stop - top, : columns.stop - first]
            _mix(lanes[block, columns], y, z, own)
            low = y.sum(dim=1)
            _mix_further(y, z, own)
            if step == rows and across == width:
                return torch.stack([low, y.sum(dim=1)])
            sums[0, block] += low
            sums[1, block] += y.sum(dim=1)
    return sums


class _Plan:
    """Keys and row ends of pieces of certain shapes laid end to end."""

    def __init__(self, shapes: Sequence[Tuple[int, int]], device: torch.device) -> None:
        keys: List[List[torch.Tensor]] = [[], [], []]
        widths: List[int] = []
        for rows, width in shapes:
            for key, own in zip(keys, _lane_keys(width, device), strict=True):
                key.append(own.repeat(rows))
            widths += [width] * rows
        self.keys = [torch.cat(key) for key in keys]
        self.ends = torch.cumsum(torch.tensor(widths, dtype=torch.int64), 0).to(device)


_plans: "OrderedDict[Tuple[torch.device, Any, Tuple[Tuple[int, int], ...]], _Plan]" = OrderedDict()
"""By stream too: one that goes may still be in use on another than it was made on."""


def sums_of_pieces(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """`row_sums` of several int64 [rows, lanes] in one go: int64 [2, all rows], piece after piece.

    For many small pieces: one pass over them end to end, and a row's sum is the difference of two running
    sums, which wrapping around does not disturb.
    """
    shapes = tuple((piece.shape[0], piece.shape[1]) for piece in pieces)
    lanes = sum(rows * width for rows, width in shapes)
    if lanes > _PLAN_LANES or any(not width for _, width in shapes):
        return torch.cat([row_sums(piece) for piece in pieces], dim=1)
    device = pieces[0].device
    name = (device, current_stream(device), shapes)
    plan = _plans.pop(name, None) or _Plan(shapes, device)
    _plans[name] = plan
    if len(_plans) > _PLANS:
        _plans.popitem(last=False)
    y = torch.cat([piece.reshape(-1) for piece in pieces])
    scratch = torch.empty_like(y)
    running = y.new_zeros((2, len(plan.ends) + 1))
    _mix(y, y, scratch, plan.keys)
    torch.index_select(torch.cumsum(y, 0), 0, plan.ends - 1, out=running[0, 1:])
    _mix_further(y, scratch, plan.keys)
    torch.index_select(torch.cumsum(y, 0), 0, plan.ends - 1, out=running[1, 1:])
    return running[:, 1:] - running[:, :-1]


def finished(sums: torch.Tensor, row_bytes: "torch.Tensor | int") -> torch.Tensor:
    """The digests int64 [rows, 2] of sums [2, rows]; `row_bytes` one for all, or one a row (int64)."""
    length = _signed(row_bytes * GOLDEN) if isinstance(row_bytes, int) else row_bytes * _signed(GOLDEN)
    low = _mixed(sums[0] + length)
    return torch.stack([low, _mixed(sums[1] ^ low) + low], dim=1)


def position_keys(positions: int, device: torch.device) -> torch.Tensor:
    """Odd multipliers for the positions 0 to `positions`, one for each sum: int64 [2, positions]."""
    _, low, high = _lane_keys(max(positions, 1), device)
    return torch.stack([low[:positions], high[:positions]])


def digest_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The digests of `tensor` seen as `rows` equal rows in memory order: int64 [rows, 2], low and high."""
    lanes, row_bytes = as_lanes(tensor, rows)
    return finished(row_sums(lanes), row_bytes)
