"""Who else got slots of the K/V pool while a capture was open: rows of requests that are not recorded.

A recorded request's slots are given away when they are evicted, and what another writes there may be found in
the cache by a recorded one again. Then the last recorded write is not the last one. So every forward of an
open capture notes the slots of its other rows, also a forward without a recorded request: on a GPU they are
copied to the host in the forward's own stream, and nobody waits.
"""

from typing import Any, List, NamedTuple, Optional

import torch

from .composition import Composition
from .recording import ArmedRows, Selection, goes_into_a_graph, to_host

_MOST_SLOTS = 1 << 22
"""Noted in one capture: 32 MiB. Beyond, any slot may have been written."""
_ANY_SLOT = -1


class _Noted(NamedTuple):
    number: int
    slots: torch.Tensor
    copied: Any
    """The event after which `slots` may be read; None: at once."""
    windowed: int


class UnseenWrites:
    """The notes of one rank for one open capture; the forward thread notes, and `table` comes at its end."""

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._noted: List[_Noted] = []
        self._slots = 0
        self._full = False

    def note(self, number: int, composition: Optional[Composition], batch: Any) -> None:
        """Notes a forward about to run; `composition` where it holds a request of ours."""
        if self._full:
            return
        slots = getattr(batch, "out_cache_loc", None)
        if not isinstance(slots, torch.Tensor) or not slots.numel() or goes_into_a_graph(slots.device):
            return
        total = int(slots.shape[0])
        if composition is not None and composition.armed:
            armed = set(ArmedRows.of(composition, total).in_batch)
            others = tuple(row for row in range(total) if row not in armed)
            if not others:
                return
            slots = Selection(others, total, slots.device).of(slots)
        self._add(number, slots, 0)
        pool = getattr(self._runner, "token_to_kv_pool", None)
        known = True
        if getattr(pool, "layers_mapping", None) is not None:
            translate = getattr(pool, "translate_loc_from_full_to_swa", None)
            known = translate is not None
            if translate is not None:
                self._add(number, translate(slots), 1)
        if self._slots > _MOST_SLOTS or not known:
            self._full = True
            self._noted.append(_Noted(number, torch.tensor([_ANY_SLOT]), None, 0))

    def _add(self, number: int, slots: torch.Tensor, windowed: int) -> None:
        # On the CPU it is not copied otherwise, and may be changed.
        host, copied = to_host(slots.to(torch.int64, copy=True))
        self._noted.append(_Noted(number, host, copied, windowed))
        self._slots += len(slots)

    def table(self) -> torch.Tensor:
        """Rows (forward number, pool slot, 1 for the pool of sliding-window layers): int64 [n, 3]."""
        parts = [torch.zeros((0, 3), dtype=torch.int64)]
        for noted in list(self._noted):
            if noted.copied is not None:
                noted.copied.synchronize()
            columns = (torch.full_like(noted.slots, noted.number), noted.slots)
            parts.append(torch.stack([*columns, torch.full_like(noted.slots, noted.windowed)], dim=1))
        return torch.cat(parts)
