"""State as it is read: the K and V rows in the pool that an attention call may read, and recurrent slots.

Looked at after the call, when its own rows are written: for each armed request all K and V rows from the
first position that any of its rows reaches to its end, found through the request's page table (translated for
a sliding-window pool), as the bytes are in the pool at that moment, at every forward.

The rows that one row reads are [low, high) positions; their digest is additive, so that every row's read, and
every window, is a difference of two running sums:

    low  = sum over positions p of  sums(K row of p)[0] * key_0(p)      modulo 2^64
    high = the same with the other sum and key

`sums` are the row digest's, unfinished; the keys are odd numbers of the position (digest.position_keys).
A recurrent slot is digested whole: before the call (what is read at the request's first row of the forward)
and after it (what is written at its last).
"""

from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .digest import as_lanes, position_keys, row_sums
from .recording import Recording

_PENDING_LANES = 1 << 20
"""Gathered K/V rows that wait to be digested together."""

_FULL_LOOK_BYTES = 64 << 20
"""Sums that one decode forward may send to the host; beyond, only those of its own rows."""


@dataclass(frozen=True)
class Span:
    """A request's positions [low, high) in a flat list, from `start` on; its own rows begin at `first`."""

    part: int
    """Place among the armed requests."""
    low: int
    high: int
    first: int
    start: int


@dataclass(frozen=True)
class KvLook:
    """Describes one transferred look at an attention layer's pool: int64 [halves, arguments, n]."""

    operator: int
    event: int
    arguments: Tuple[int, ...]
    row_bytes: Tuple[int, ...]
    plan: int
    own_rows_only: bool


@dataclass(frozen=True)
class KvRead:
    """Describes the digests of what each armed row read: int64 [halves, arguments, rows]."""

    operator: int
    arguments: Tuple[int, ...]
    window: Optional[int]


@dataclass(frozen=True)
class KvSlots:
    """Describes the pool slots of a plan's positions: int64 [n]."""

    plan: int
    spans: Tuple[Span, ...]


@dataclass(frozen=True)
class RecurrentLook:
    """Describes the armed requests' slots of one state: int64 [3, requests]: pool slot, low, high."""

    operator: int
    event: int
    argument: int
    row_bytes: int
    written: bool


class _Plan:
    """What the layers with one window share in a forward: slots, keys and the bounds of each row's read."""

    def __init__(self, recording: Recording, batch: Any, window: Optional[int]) -> None:
        spans: List[Span] = []
        pool_rows, positions, low_at, high_at = [], [], [], []
        start = 0
        for place, (index, part) in enumerate(recording.rows.parts):
            first, end = part.first_position, part.seq_len
            low = 0 if window is None else max(0, first - window)
            spans.append(Span(place, low, end, first, start))
            pool_rows.append(torch.full((end - low,), index, dtype=torch.int64))
            positions.append(torch.arange(low, end))
            own = torch.arange(first, end)
            lows = torch.zeros_like(own) if window is None else (own - window).clamp_(min=0)
            low_at.append(lows + (start - low))
            high_at.append(own + (start - low + 1))
            start += end - low
        self.spans = tuple(spans)
        device = recording.device
        position = torch.cat(positions)
        self.keys = position_keys(int(position.max()) + 1, device).index_select(1, position.to(device))
        self.low_at, self.high_at = torch.cat(low_at).to(device), torch.cat(high_at).to(device)
        self._pool_rows, self._positions = torch.cat(pool_rows).to(device), position.to(device)
        self._batch = batch
        self._slots: Dict[bool, torch.Tensor] = {}

    def slots(self, req_to_token: torch.Tensor, translate: Optional[Callable[[Any], Any]]) -> torch.Tensor:
        """The pool slots of all positions, int64 [n]; `translate` turns them into a windowed pool's."""
        known = self._slots.get(translate is not None)
        if known is None:
            requests = self._batch.req_pool_indices.to(torch.int64).index_select(0, self._pool_rows)
            known = req_to_token[requests, self._positions].to(torch.int64)
            if translate is not None:
                known = translate(known).to(torch.int64)
            self._slots[translate is not None] = known
        return known


class StateReads:
    """The looks of one forward."""

    def __init__(self, recording: Recording, batch: Any, layers: int, argument: Callable[[str], int]) -> None:
        self._recording = recording
        self._batch = batch
        self._layers = max(layers, 1)
        self._argument = argument
        self._plans: Dict[Optional[int], _Plan] = {}
        self.own_rows_only = False
        """Whether old positions were too many to be sent one by one; reads are digested all the same."""
        self._gathered: List[Tuple[KvLook, Optional[int], _Plan, List[torch.Tensor]]] = []
        self._gathered_lanes = 0
        self._sent: Dict[Tuple[Optional[int], bool], int] = {}

    def attention(self, operator: int, module: Any, window: Optional[int]) -> None:
        """Looks at what `module`'s call could read. To be called after the call."""
        from sglang.srt.model_executor.forward_context import get_req_to_token_pool, get_token_to_kv_pool

        pool = get_token_to_kv_pool()
        layers = getattr(pool, "layers_mapping", None)
        windowed = bool(layers is not None and layers[module.layer_id][1])
        self.look(
            operator,
            window,
            get_req_to_token_pool().req_to_token,
            (("k", pool.get_key_buffer(module.layer_id)), ("v", pool.get_value_buffer(module.layer_id))),
            pool.translate_loc_from_full_to_swa if windowed else None,
        )

    def look(
        self,
        operator: int,
        window: Optional[int],
        req_to_token: torch.Tensor,
        buffers: Tuple[Tuple[str, torch.Tensor], ...],
        translate: Optional[Callable[[Any], Any]],
    ) -> None:
        """Gathers the rows of `buffers` [slots, ...] that the armed rows may read; `finish` digests them."""
        recording = self._recording
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = _Plan(recording, self._batch, window)
        slots = plan.slots(req_to_token, translate)
        number = self._sent.get((window, translate is not None))
        if number is None:
            number = self._sent[window, translate is not None] = len(self._sent)
            recording.extras.append((KvSlots(number, plan.spans), slots))
        lanes, row_bytes = [], []
        for _, buffer in buffers:
            own, size = as_lanes(buffer.index_select(0, slots), len(slots))
            lanes.append(own)
            row_bytes.append(size)
        arguments = tuple(self._argument(name) for name, _ in buffers)
        look = KvLook(operator, recording.event, arguments, tuple(row_bytes), number, False)
        self._gathered.append((look, window, plan, lanes))
        self._gathered_lanes += sum(own.numel() for own in lanes)
        if self._gathered_lanes > _PENDING_LANES:
            self.finish()

    def finish(self) -> None:
        """Digests what was gathered, layers together, and sends it with the recording."""
        gathered, self._gathered, self._gathered_lanes = self._gathered, [], 0
        by_width: Dict[int, List[torch.Tensor]] = {}
        for _, _, _, lanes in gathered:
            for own in lanes:
                by_width.setdefault(own.shape[1], []).append(own)
        sums = {width: iter(_summed(parts)) for width, parts in by_width.items()}
        for look, window, plan, lanes in gathered:
            seen = torch.stack([next(sums[own.shape[1]]) for own in lanes], dim=1)
            self._send(look, window, plan, seen)

    def _send(self, look: KvLook, window: Optional[int], plan: _Plan, seen: torch.Tensor) -> None:
        """`seen` are the sums int64 [halves, arguments, n]."""
        recording = self._recording
        running = torch.nn.functional.pad(torch.cumsum(seen * plan.keys[:, None, :], dim=2), (1, 0))
        read = running.index_select(2, plan.high_at) - running.index_select(2, plan.low_at)
        decode = recording.composition.mode == "decode"
        if decode and seen.numel() * 8 * self._layers > _FULL_LOOK_BYTES:
            seen = seen.index_select(2, plan.high_at - 1)
            look = replace(look, own_rows_only=True)
            self.own_rows_only = True
        recording.extras.append((look, seen))
        recording.extras.append((KvRead(look.operator, look.arguments, window), read))

    def recurrent(self, operator: int, module: Any, written: bool) -> None:
        """Looks at the armed requests' recurrent slots, before or after `module`'s call."""
        from sglang.srt.model_executor.forward_context import get_req_to_token_pool

        pool = get_req_to_token_pool()
        layer = getattr(module, "layer_id", None)
        layer = getattr(module, "layer_idx", None) if layer is None else layer
        cache = pool.mamba2_layer_cache(layer)
        places = torch.tensor([index for index, _ in self._recording.rows.parts], dtype=torch.int64)
        requests = self._batch.req_pool_indices.index_select(0, places.to(self._recording.device))
        slots = pool.get_mamba_indices(requests)
        slots = getattr(pool, "translate_mamba_indices", lambda found: found)(slots).to(torch.int64)
        states = [("conv" if i == 0 else f"conv{i}", conv) for i, conv in enumerate(cache.conv)]
        for name, state in [*states, ("temporal", cache.temporal)]:
            if state is not None and state.numel():
                self.look_at_slots(operator, name, state, slots, written)

    def look_at_slots(
        self, operator: int, name: str, state: torch.Tensor, slots: torch.Tensor, written: bool
    ) -> None:
        """Digests rows `slots`, one for each armed request, of `state` [slots, ...]."""
        lanes, row_bytes = as_lanes(state.index_select(0, slots), len(slots))
        about = RecurrentLook(operator, self._recording.event, self._argument(name), row_bytes, written)
        self._recording.extras.append((about, torch.cat([slots[None], row_sums(lanes)])))


def _summed(parts: List[torch.Tensor]) -> List[torch.Tensor]:
    """`row_sums` of each part [n, lanes], all of one width, taken together: int64 [2, n] each."""
    sums = row_sums(torch.cat(parts) if len(parts) > 1 else parts[0])
    return list(torch.split(sums, [len(part) for part in parts], dim=1))
