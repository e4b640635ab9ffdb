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
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from .attention_metadata import verdicts
from .conv_reads import ConvolutionRead
from .digest import as_lanes, position_keys, row_sums, rows_at
from .recording import Recording, to_device

_PENDING_LANES = 1 << 20
"""Gathered K/V rows that wait to be digested together."""

METADATA = "metadata"
"""The argument under which verdicts on the backend's metadata stand among the reads."""

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


@dataclass(frozen=True)
class MetadataLook:
    """Describes what the attention backend was told of the armed requests: verdicts int64 [requests]."""

    operator: int
    argument: int


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
        mine = [position, torch.cat(low_at), torch.cat(high_at), torch.cat(pool_rows)]
        self.positions, self.low_at, self.high_at, self.places = to_device(mine, device)
        self.keys = position_keys(int(position.max()) + 1, device).index_select(1, self.positions)
        self._batch = batch
        self._slots: Dict[bool, torch.Tensor] = {}

    def slots(self, req_to_token: torch.Tensor, translate: Optional[Callable[[Any], Any]]) -> torch.Tensor:
        """The pool slots of all positions, int64 [n]; `translate` turns them into a windowed pool's."""
        known = self._slots.get(translate is not None)
        if known is None:
            requests = self._batch.req_pool_indices.to(torch.int64).index_select(0, self.places)
            known = req_to_token[requests, self.positions].to(torch.int64)
            if translate is not None:
                known = translate(known).to(torch.int64)
            self._slots[translate is not None] = known
        return known


class Pools(NamedTuple):
    """Where a runner keeps state: its req_to_token_pool, with recurrent slots if any, and its K/V pool."""

    requests: Any
    kv: Any


def _pools_of_forward() -> Pools:
    from sglang.srt.model_executor.forward_context import get_req_to_token_pool, get_token_to_kv_pool

    return Pools(get_req_to_token_pool(), get_token_to_kv_pool())


_Gathered = Tuple[KvLook, Optional[int], _Plan, List[torch.Tensor]]
"""A look with its window, its plan and its rows of state as lanes."""


class Mark(NamedTuple):
    """How far the looks of a forward are: what is sent with the recording and what waits to be digested."""

    extras: int
    sent: int
    gathered: List[_Gathered]
    looks: int
    lanes: int


class StateReads:
    """The looks of one forward; `pools` where they are not asked of the forward that runs."""

    def __init__(
        self,
        recording: Recording,
        batch: Any,
        layers: int,
        argument: Callable[[str], int],
        pools: Optional[Pools] = None,
    ) -> None:
        self._recording = recording
        self._batch = batch
        self._pools = pools
        self._layers = max(layers, 1)
        self._argument = argument
        self._plans: Dict[Optional[int], _Plan] = {}
        self.own_rows_only = False
        """Whether old positions were too many to be sent one by one; reads are digested all the same."""
        self._gathered: List[_Gathered] = []
        self._gathered_lanes = 0
        self._sent: Dict[Tuple[Optional[int], str], int] = {}
        self._convolution: Optional[ConvolutionRead] = None
        """The convolution that runs."""
        self._metadata_seen = False
        self.unknown_backend: Optional[str] = None
        """An attention backend whose metadata could not be judged."""

    def mark(self) -> Mark:
        """Before a look that may fail, for `undo`."""
        gathered = self._gathered
        return Mark(
            len(self._recording.extras), len(self._sent), gathered, len(gathered), self._gathered_lanes
        )

    def undo(self, mark: Mark) -> None:
        """Takes back whatever was looked at since `mark`: nothing sent later may build on it."""
        del self._recording.extras[mark.extras :]
        while len(self._sent) > mark.sent:
            self._sent.popitem()
        # `finish` leaves the list that it took as it was.
        self._gathered, self._gathered_lanes = mark.gathered, mark.lanes
        del self._gathered[mark.looks :]

    def attention(self, operator: int, module: Any, window: Optional[int]) -> None:
        """Looks at what `module`'s call could read. To be called after the call."""
        requests, pool = self._pools or _pools_of_forward()
        layers = getattr(pool, "layers_mapping", None)
        windowed = bool(layers is not None and layers[module.layer_id][1])
        self.look(
            operator,
            window,
            requests.req_to_token,
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
        slots = self._plan(window).slots(req_to_token, translate)
        kind = "windowed" if translate is not None else "full"
        rows = tuple((name, rows_at(buffer, slots)) for name, buffer in buffers)
        self._gather(operator, window, kind, slots, rows)

    def metadata(self, operator: int) -> None:
        """Judges what the attention backend of the forward that runs was told; once is enough."""
        from sglang.srt.model_executor.forward_context import get_attn_backend, get_req_to_token_pool

        if self._metadata_seen:
            return
        self._metadata_seen = True
        recording, plan = self._recording, self._plan(None)
        parts = recording.rows.parts
        expected = (
            [index for index, _ in parts],
            [part.prefix_len for _, part in parts],
            [part.seq_len for _, part in parts],
            recording.composition.mode == "decode",
        )
        backend = get_attn_backend()
        slots = plan.slots(get_req_to_token_pool().req_to_token, None)
        found = verdicts(backend, self._batch, expected, plan.places, plan.positions, slots)
        if found is None:
            self.unknown_backend = type(backend).__name__
            return
        recording.extras.append((MetadataLook(operator, self._argument(METADATA)), found))

    def before_convolution(self, module: Any, rows: torch.Tensor) -> None:
        """Keeps what `module` will read: its slots and `rows` [batch rows, channels]."""
        self._convolution = None
        pool = (self._pools or _pools_of_forward()).requests
        self._convolution = ConvolutionRead(self._recording, self._batch, pool, module, rows)

    def convolution(self, operator: int, module: Any) -> None:
        """Looks at what `module`'s call read and left in its slots. To be called after the call."""
        read, self._convolution = self._convolution, None
        if read is None:
            raise RuntimeError("its state was not seen before the call")
        slots, rows = read.result()
        self._gather(operator, module.behind, "recurrent", slots, (("conv", rows),))

    def _plan(self, window: Optional[int]) -> _Plan:
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = _Plan(self._recording, self._batch, window)
        return plan

    def _gather(
        self,
        operator: int,
        window: Optional[int],
        kind: str,
        slots: torch.Tensor,
        rows: Tuple[Tuple[str, torch.Tensor], ...],
    ) -> None:
        """Takes rows of state [n, ...] by argument, at the plan's positions, for `finish` to digest."""
        plan = self._plan(window)
        number = self._sent.get((window, kind))
        if number is None:
            number = self._sent[window, kind] = len(self._sent)
            self._recording.extras.append((KvSlots(number, plan.spans), slots))
        lanes, row_bytes = [], []
        for _, state in rows:
            own, size = as_lanes(state, len(slots))
            lanes.append(own)
            row_bytes.append(size)
        arguments = tuple(self._argument(name) for name, _ in rows)
        look = KvLook(operator, self._recording.event, arguments, tuple(row_bytes), number, False)
        self._gathered.append((look, window, plan, lanes))
        self._gathered_lanes += sum(own.numel() for own in lanes)
        if self._gathered_lanes > _PENDING_LANES:
            self.finish()

    def finish(self) -> None:
        """Digests what was gathered, layers together, and sends it with the recording."""
        gathered, self._gathered, self._gathered_lanes = self._gathered, [], 0
        self._recording.join(own for _, _, _, lanes in gathered for own in lanes)
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

    def recurrent(self, operator: int, layer: Optional[int], written: bool) -> None:
        """Looks at the armed requests' recurrent slots of a layer, before or after its call."""
        if layer is None:
            raise RuntimeError("neither the module nor any around it has a layer number")
        pool = (self._pools or _pools_of_forward()).requests
        cache = pool.mamba2_layer_cache(layer)
        requests = self._batch.req_pool_indices.index_select(0, self._recording.requests)
        slots = pool.get_mamba_indices(requests)
        if not written:
            if self._copies and getattr(pool, "mamba_ckpt_pool", None) is not None:
                # Checkpoints of another type are turned into states by the forward itself.
                return
            slots = self._before_copies(slots)
        slots = getattr(pool, "translate_mamba_indices", lambda found: found)(slots).to(torch.int64)
        states = [("conv" if i == 0 else f"conv{i}", conv) for i, conv in enumerate(cache.conv)]
        for name, state in [*states, ("temporal", cache.temporal)]:
            if state is not None and state.numel():
                self.look_at_slots(operator, name, state, slots, written)

    @property
    def _copies(self) -> bool:
        """Whether the forward will copy checkpoints to their new owners before it computes."""
        source = getattr(self._batch, "mamba_cow_src_indices", None)
        return source is not None and len(source) > 0

    def _before_copies(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots that hold the states of `slots`, where they are still to be copied there."""
        if not self._copies:
            return slots
        source, target = self._batch.mamba_cow_src_indices, self._batch.mamba_cow_dst_indices
        same = slots[:, None] == target[None, :].to(slots.dtype)
        return torch.where(same.any(dim=1), source.to(slots.dtype)[same.int().argmax(dim=1)], slots)

    def look_at_slots(
        self, operator: int, name: str, state: torch.Tensor, slots: torch.Tensor, written: bool
    ) -> None:
        """Digests rows `slots`, one for each armed request, of `state` [slots, ...]."""
        lanes, row_bytes = as_lanes(rows_at(state, slots), len(slots))
        about = RecurrentLook(operator, self._recording.event, self._argument(name), row_bytes, written)
        self._recording.extras.append((about, torch.cat([slots[None], row_sums(lanes)])))


def _summed(parts: List[torch.Tensor]) -> List[torch.Tensor]:
    """`row_sums` of each part [n, lanes], all of one width, taken together: int64 [2, n] each."""
    sums = row_sums(torch.cat(parts) if len(parts) > 1 else parts[0])
    return list(torch.split(sums, [len(part) for part in parts], dim=1))
