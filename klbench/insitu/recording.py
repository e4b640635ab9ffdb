"""One armed forward while it runs: digests of its tensors stay on the device until it ends.

A *piece* is the rows of one tensor that were digested; an *entry* says which argument of which call it was.
Where every operator is torch's own (the CPU engine), a tensor that is the same storage, version, shape and
stride as one seen before in this forward is an entry more and no piece; elsewhere kernels change tensors
without telling their version, and everything is digested. Small pieces are copied at once (whatever happens
to the tensor afterwards) and digested together at the end; large ones are digested on the spot. Only rows of
armed requests are taken.

Row groups: WHOLE is a tensor without rows, ROWS all armed rows in batch order, and each further group a list
of armed rows that the head adds (it sees few of the batch's rows).
"""

import weakref
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from .composition import Composition, Part
from .digest import as_lanes, current_stream, row_sums, rows_at, sums_of_pieces

WHOLE, ROWS = 0, 1
_SMALL_BYTES = 1 << 15
_PENDING_LANES = 1 << 17

NO_ROWS = -1
Axes = Dict[Tuple[int, int, int], int]
"""Operator, direction and argument to the dimension of their rows where that is not the first, or NO_ROWS
where a forward has shown that the tensor has none."""

Entry = Tuple[int, int, int, int, int, int, int, int]
"""Operator, direction, argument, dtype, row bytes, event, group, piece."""


def row_axis(shape: Sequence[int], total: int, known: Optional[int] = None) -> Optional[int]:
    """Which dimension of a tensor has the batch's `total` rows: the `known` one that another forward has told
    (NO_ROWS: none), else the first where it is a multiple of them (heads of a row), else the only one of just
    this size, as in [1, rows, heads, size] or [1, heads, rows, size]. None for a tensor without rows, and
    where several could be them."""
    if not shape or not shape[0] or known == NO_ROWS:
        return None
    exact = [axis for axis, size in enumerate(shape) if size == total]
    if known in exact:
        return known
    if not shape[0] % total:
        return 0
    return exact[0] if len(exact) == 1 else None


def shows_no_rows(shape: Sequence[int], total: int) -> bool:
    """Whether nothing in a tensor's shape can be the batch's `total` rows. An empty one shows nothing."""
    return bool(shape) and shape[0] > 0 and shape[0] % total > 0 and total not in shape


def keep_for(stream: Any, tensors: Iterable[torch.Tensor]) -> None:
    """Keeps the memory of tensors that were made on another stream until `stream` has used them."""
    for tensor in tensors:
        tensor.record_stream(stream)


def goes_into_a_graph(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured from what runs now: nothing of it is computed, and reading any
    value would end the capture, and with it the server."""
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


class Names:
    """Numbers names in the order they come; `new` are those that nobody has taken over yet."""

    def __init__(self) -> None:
        self._numbers: Dict[Any, int] = {}
        self._new: List[Any] = []

    def number(self, name: Any, about: Any = None) -> int:
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = len(self._numbers)
            self._new.append(name if about is None else about)
        return found

    def take_new(self) -> List[Any]:
        new, self._new = self._new, []
        return new


class Piece(NamedTuple):
    """`rows` digests of rows of `row_bytes`; `group` names the rows."""

    group: int
    rows: int
    row_bytes: int


@dataclass(frozen=True)
class ArmedRows:
    """Where the armed rows lie in a forward's batch, in batch order."""

    total: int
    """All rows of the batch."""
    in_batch: Tuple[int, ...]
    parts: Tuple[Tuple[int, Part], ...]
    """The armed requests, each with its place among the batch's requests."""

    @classmethod
    def of(cls, composition: Composition, total: int) -> "ArmedRows":
        parts = tuple(
            (place, part)
            for place, part in enumerate(composition.parts)
            if part.parsed is not None and part.parsed.armed
        )
        rows = tuple(row for _, part in parts for row in range(part.row, part.row + part.rows))
        return cls(total, rows, parts)


class Selection:
    """Some rows of a tensor with `total` rows: a view where they follow one another, else a gather."""

    def __init__(self, rows: Tuple[int, ...], total: int, device: torch.device) -> None:
        self.rows = rows
        self.total = total
        self._first = rows[0] if rows else 0
        self._span = not rows or rows[-1] - rows[0] + 1 == len(rows)
        self._index: Optional[torch.Tensor] = None
        if not self._span and len(rows) != total:
            # Made here and not on first use: the streams of a forward wait for the one in which it began.
            (self._index,) = to_device([torch.tensor(rows, dtype=torch.int64)], device)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The chosen rows of [total, ...]; shares memory where it can."""
        if len(self.rows) == self.total:
            return tensor
        if self._span:
            return tensor.narrow(0, self._first, len(self.rows))
        assert self._index is not None
        return rows_at(tensor, self._index)


class _OnStream:
    """What was taken on one stream: pieces that wait to be digested together there, and sums of others."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.waiting: List[torch.Tensor] = []
        self.waiting_pieces: List[int] = []
        self.waiting_lanes = 0
        self.order: List[int] = []
        self.sums: List[torch.Tensor] = []

    def digest_waiting(self) -> None:
        if self.waiting:
            self.order += self.waiting_pieces
            self.sums.append(sums_of_pieces(self.waiting))
            self.waiting, self.waiting_pieces, self.waiting_lanes = [], [], 0


class Recording:
    """What is known of one forward so far. Used by the forward thread alone, until `take`.

    A model may run parts of a layer on another stream. Pieces are copied on the stream that runs their call,
    and digested on that one or behind a wait for it.
    """

    def __init__(
        self,
        composition: Composition,
        rows: ArmedRows,
        device: torch.device,
        dtypes: Names,
        versions_tell: bool,
        axes: Optional[Axes] = None,
    ) -> None:
        self.composition = composition
        self._axes: Axes = {} if axes is None else axes
        self.rows = rows
        self.device = device
        self.entries: List[Entry] = []
        self.pieces: List[Piece] = []
        self.lists: List[Tuple[int, ...]] = []
        """Rows of each group beyond ROWS, as places among the armed rows."""
        self.event = -1
        self._dtypes = dtypes
        self._versions_tell = versions_tell and not torch.is_inference_mode_enabled()
        self._selection = Selection(rows.in_batch, rows.total, device)
        self._places = {row: place for place, row in enumerate(rows.in_batch)}
        self._requests: Optional[torch.Tensor] = None
        self._known: Dict[Any, Tuple[Any, Any, int]] = {}
        self._here: Optional[_OnStream] = None
        self._streams: Dict[Any, _OnStream] = {}
        self.extras: List[Tuple[Any, torch.Tensor]] = []
        """What others want to have on the host: (what it is, int64 tensor)."""

    def next_event(self) -> int:
        self.event += 1
        return self.event

    def add(self, operator: int, direction: int, argument: int, tensor: torch.Tensor) -> None:
        """Notes a tensor with the forward's rows, or a whole one."""
        total = self.rows.total
        axis = self._axis_of((operator, direction, argument), tensor)
        group = WHOLE if axis is None else ROWS
        known = self._lookup(tensor, group, axis or 0)
        if known is None:
            rows_first = tensor.movedim(axis, 0) if axis else tensor
            known = self._new_piece(rows_first, group, total, self._selection)
        self._enter(operator, direction, argument, tensor, known)

    def _axis_of(self, name: Tuple[int, int, int], tensor: torch.Tensor) -> Optional[int]:
        """The dimension of the tensor's rows, None where it has none; remembers what tells later forwards."""
        # Weights, as the sinks of an attention, have no rows, whatever multiple of them their size is.
        if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
            return None
        shape, total = tensor.shape, self.rows.total
        known = self._axes.get(name)
        if known is None and shape and shape[0] and not shape[0] % total:
            return 0
        axis = row_axis(shape, total, known)
        if axis:
            self._axes[name] = axis
        elif axis is None and shows_no_rows(shape, total):
            self._axes[name] = NO_ROWS
        return axis

    def add_rows(
        self,
        operator: int,
        direction: int,
        argument: int,
        tensor: torch.Tensor,
        group: int,
        chosen: Selection,
    ) -> None:
        """Notes a tensor whose rows are those of `group`, found in it by `chosen`."""
        known = self._lookup(tensor, group)
        piece = known if known is not None else self._new_piece(tensor, group, tensor.shape[0], chosen)
        self._enter(operator, direction, argument, tensor, piece)

    def _enter(self, operator: int, direction: int, argument: int, tensor: torch.Tensor, piece: int) -> None:
        about = self.pieces[piece]
        dtype = self._dtypes.number(tensor.dtype, str(tensor.dtype).replace("torch.", ""))
        self.entries.append(
            (operator, direction, argument, dtype, about.row_bytes, self.event, about.group, piece)
        )

    def repeat(self, operator: int, direction: int, argument: int) -> None:
        """Notes the latest tensor once more: what left one operator is what entered the next."""
        _, _, _, dtype, row_bytes, _, group, piece = self.entries[-1]
        self.entries.append((operator, direction, argument, dtype, row_bytes, self.event, group, piece))

    def group_of(self, batch_rows: Sequence[int]) -> Tuple[int, Selection]:
        """The group of the armed rows among `batch_rows`, and where they lie in a tensor of those rows."""
        place = self._places
        chosen = [(index, place[row]) for index, row in enumerate(batch_rows) if row in place]
        members = tuple(member for _, member in chosen)
        selection = Selection(tuple(index for index, _ in chosen), len(batch_rows), self.device)
        if members == tuple(range(len(self.rows.in_batch))):
            return ROWS, selection
        if members not in self.lists:
            self.lists.append(members)
        return self.lists.index(members) + 2, selection

    def _lookup(self, tensor: torch.Tensor, group: int, axis: int = 0) -> Optional[int]:
        """The piece that has this tensor's bits, if it was digested and not changed since."""
        if not self._versions_tell:
            return None
        # A view's storage lives as long as its base. A dead owner's memory and id may have gone to another.
        base = tensor._base
        owner = tensor if base is None else base
        # Without gaps the bytes are the rows, whatever heads or dtype they are seen as.
        about: Any = (tensor._version, tensor.nbytes)
        if not tensor.is_contiguous():
            about = (*about, tensor.shape, tensor.stride())
        key = (id(owner), tensor.data_ptr(), group, axis)
        found = self._known.get(key)
        if found is not None and found[0]() is owner and found[1] == about:
            return found[2]
        self._known[key] = (weakref.ref(owner), about, len(self.pieces))
        return None

    def _new_piece(self, tensor: torch.Tensor, group: int, total: int, chosen: Selection) -> int:
        if tensor.requires_grad:
            tensor = tensor.detach()
        if group == WHOLE:
            rows, part = 1, tensor.reshape(1, -1)
        else:
            rows = len(chosen.rows)
            flat = tensor if tensor.dim() == 2 and tensor.shape[0] == total else tensor.reshape(total, -1)
            part = chosen.of(flat)
        row_bytes = part.shape[1] * part.element_size()
        number = len(self.pieces)
        self.pieces.append(Piece(group, rows, row_bytes))
        here = self._on_stream()
        if rows * row_bytes <= _SMALL_BYTES:
            copy = part.clone(memory_format=torch.contiguous_format)
            lanes = copy.view(torch.int64) if row_bytes and not row_bytes % 8 else as_lanes(copy, rows)[0]
            here.waiting.append(lanes)
            here.waiting_pieces.append(number)
            here.waiting_lanes += lanes.numel()
            if here.waiting_lanes > _PENDING_LANES:
                here.digest_waiting()
        else:
            here.order.append(number)
            here.sums.append(row_sums(as_lanes(part, rows)[0]))
        return number

    def _on_stream(self) -> _OnStream:
        """What was taken on the stream that runs now."""
        stream, here = current_stream(self.device), self._here
        if here is None or here.stream != stream:
            here = self._here = self._streams.setdefault(stream, _OnStream(stream))
        return here

    def join(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        """Makes the stream that runs now wait for the forward's others, so that it may use `tensors`."""
        now = current_stream(self.device)
        others = [stream for stream in self._streams if stream != now]
        for stream in others:
            now.wait_stream(stream)
        if others:
            keep_for(now, tensors)

    @property
    def requests(self) -> torch.Tensor:
        """The armed requests' places in the batch, on the device: one transfer for all who ask."""
        if self._requests is None:
            places = torch.tensor([place for place, _ in self.rows.parts], dtype=torch.int64)
            (self._requests,) = to_device([places], self.device)
        return self._requests

    def selected(self, tensor: torch.Tensor) -> torch.Tensor:
        """The armed rows of a tensor [all rows, ...]."""
        return self._selection.of(tensor)

    def take(self) -> "Taken":
        """Ends the recording: everything on its way to the host in one transfer."""
        taken = list(self._streams.values())
        made = [tensor for _, tensor in self.extras]
        self.join([*made, *(tensor for part in taken for tensor in (*part.sums, *part.waiting))])
        together = self._on_stream()
        for part in taken:
            if part is not together:
                together.order, together.sums = part.order + together.order, part.sums + together.sums
                together.waiting, together.waiting_pieces = (
                    part.waiting + together.waiting,
                    part.waiting_pieces + together.waiting_pieces,
                )
        together.digest_waiting()
        sums = torch.cat(together.sums, dim=1) if together.sums else torch.zeros((2, 0), dtype=torch.int64)
        flat = torch.cat([sums.reshape(-1).to(self.device), *(tensor.reshape(-1) for tensor in made)])
        host, copied = to_host(flat)
        return Taken(
            composition=self.composition,
            rows=self.rows,
            entries=tuple(self.entries),
            pieces=tuple(self.pieces),
            order=tuple(together.order),
            lists=tuple(self.lists),
            extras=tuple((what, tensor.shape) for what, tensor in self.extras),
            versions_told=self._versions_tell,
            host=host,
            copied=copied,
        )


@dataclass(frozen=True)
class Taken:
    """A finished recording, for the writer thread. `host` may be read once `copied` has happened."""

    composition: Composition
    rows: ArmedRows
    entries: Tuple[Entry, ...]
    pieces: Tuple[Piece, ...]
    order: Tuple[int, ...]
    lists: Tuple[Tuple[int, ...], ...]
    extras: Tuple[Tuple[Any, Any], ...]
    versions_told: bool
    """Whether tensors that were passed on are already one piece."""
    host: torch.Tensor
    copied: Any

    def arrived(self) -> Tuple[torch.Tensor, List[Tuple[Any, torch.Tensor]]]:
        """The sums [2, digests] in the order of `order`, and the extras. Waits for the transfer."""
        if self.copied is not None:
            self.copied.synchronize()
        digests = sum(self.pieces[number].rows for number in self.order)
        place = 2 * digests
        extras = []
        for what, shape in self.extras:
            size = shape.numel()
            extras.append((what, self.host[place : place + size].reshape(shape)))
            place += size
        return self.host[: 2 * digests].reshape(2, digests), extras


def to_device(lists: Sequence[torch.Tensor], device: torch.device) -> List[torch.Tensor]:
    """Lists of int64 made here, on the device, in one transfer that nobody waits for."""
    flat = torch.cat(list(lists))
    if device.type != "cpu":
        flat = flat.pin_memory().to(device, non_blocking=True)
    return list(torch.split(flat, [len(values) for values in lists]))


def to_host(flat: torch.Tensor) -> Tuple[torch.Tensor, Any]:
    """`flat` on the host, and the event after which it is there (None: at once). Nobody waits here."""
    if flat.device.type == "cpu":
        return flat, None
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    host.copy_(flat, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event
