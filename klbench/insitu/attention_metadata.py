"""What an attention backend was told: the lengths and page table that it reads, against the request's own.

A backend keeps both in tensors of its own, made anew for each forward. They differ between the arms rightly,
so they are judged in place: against the lengths that were counted (composition.py) and the slots in the
request's page table. Known are the backends whose use of their metadata was read in sglang's source:

    torch_native   reads the batch itself: seq_lens, extend_prefix_lens
    fa3            forward_metadata: cache_seqlens_int32, page_table (whole pages)
    triton         forward_metadata: kv_indptr, kv_indices (all keys in decode, the prefix in an extend)

Layers with a K/V pool of their own for their window read other tables: they are not judged.
"""

from typing import Any, Dict, List, Optional, Tuple

import torch

from .recording import to_device

LENGTH, SLOTS = 1, 2
"""Bits of a verdict: another length, other slots."""

Expected = Tuple[List[int], List[int], List[int], bool]
"""Of the armed requests: places in the batch, prefixes, lengths after the forward; whether it is a decode."""


def verdicts(
    backend: Any,
    batch: Any,
    expected: Expected,
    places: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> Optional[torch.Tensor]:
    """For each armed request 0 or the bits of what is wrong: int64 [requests]; None for an unknown backend.

    The request at batch place `places[i]` has its K/V row of `positions[i]` in pool slot `slots[i]`.
    """
    inner = _innermost(backend, batch)
    reader = _READERS.get(type(inner).__name__)
    if reader is None:
        return None
    told = reader(inner, batch, expected[3])
    if told is None:
        return None
    place, prefix, length = to_device(
        [torch.tensor(part, dtype=torch.int64) for part in expected[:3]], slots.device
    )
    keys = prefix if told.prefix_only else length
    wrong = (told.lengths.to(torch.int64).index_select(0, place) != keys).to(torch.int64) * LENGTH
    if told.slots is None:
        return wrong
    found = told.slots(places, positions)
    read = positions < torch.zeros_like(told.lengths, dtype=torch.int64).index_copy_(0, place, keys)[places]
    bad = torch.zeros_like(told.lengths, dtype=torch.int64)
    bad.index_add_(0, places, ((found != slots) & read).to(torch.int64))
    return wrong + (bad.index_select(0, place) > 0).to(torch.int64) * SLOTS


class _Told:
    """Lengths by place in the batch, and a function from (places, positions) to pool slots."""

    def __init__(self, lengths: torch.Tensor, slots: Any, prefix_only: bool = False) -> None:
        self.lengths = lengths
        self.slots = slots
        self.prefix_only = prefix_only


def _innermost(backend: Any, batch: Any) -> Any:
    """The backend that full attention runs in, out of those that choose one."""
    for _ in range(3):
        if hasattr(backend, "full_attn_backend"):
            backend = backend.full_attn_backend
        elif hasattr(backend, "_select_backend"):
            backend = backend._select_backend(batch.forward_mode)
        else:
            break
    return backend


def _torch_native(backend: Any, batch: Any, decode: bool) -> Optional[_Told]:  # noqa: ARG001 - as the others
    lengths = batch.seq_lens
    if not decode and getattr(batch, "extend_prefix_lens", None) is not None:
        lengths = batch.extend_prefix_lens + batch.extend_seq_lens
        # Where the two disagree neither is the length: nothing has it.
        lengths = torch.where(lengths == batch.seq_lens, lengths, torch.full_like(lengths, -1))
    return _Told(lengths, None)


def _flash_attention(backend: Any, batch: Any, decode: bool) -> Optional[_Told]:  # noqa: ARG001 - as the others
    metadata = backend.forward_metadata
    table, lengths = metadata.page_table, metadata.cache_seqlens_int32
    if table is None or lengths is None:
        return None
    page = int(getattr(backend, "page_size", 1) or 1)

    def slots(places: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        column = (positions // page).clamp_(max=table.shape[1] - 1)
        return table[places, column].to(torch.int64) * page + positions % page

    return _Told(lengths, slots)


def _triton(backend: Any, batch: Any, decode: bool) -> Optional[_Told]:  # noqa: ARG001 - as the others
    metadata = backend.forward_metadata
    ends, indices = metadata.kv_indptr, metadata.kv_indices
    if ends is None or indices is None:
        return None
    starts = ends[:-1].to(torch.int64)

    def slots(places: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        at = (starts[places] + positions).clamp_(max=max(len(indices) - 1, 0))
        return indices[at].to(torch.int64) if len(indices) else torch.full_like(positions, -1)

    return _Told(ends[1:] - ends[:-1], slots, prefix_only=not decode)


_READERS: Dict[str, Any] = {
    "TorchNativeAttnBackend": _torch_native,
    "FlashAttentionBackend": _flash_attention,
    "TritonAttnBackend": _triton,
}
