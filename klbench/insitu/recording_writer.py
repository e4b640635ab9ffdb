"""Writes finished recordings into a trace, in a thread of its own behind a bounded queue.

The thread shares the interpreter with the server's forwards, which it would make several times slower, so it
works while none is recorded and none has just been: between arms, when the queue is full, and at the end.

The sampler's results come after their forward; those of a chunk that does not end its prompt were never used,
which shows at the request's next forward.
"""

import shutil
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from .composition import Part
from .digest import finished
from .recording import ROWS, WHOLE, Taken
from .state_tables import StateTables
from .trace_writer import TraceWriter

_QUEUE_BYTES = 256 << 20
"""Recordings that may wait: nearly always all of an arm's."""
_QUIET_S = 0.05
_POLL_S = 0.02
_PATIENCE_S = 60.0
_SWITCH_S = 1e-4
"""A busy scheduler gives up the interpreter after so long, and each tensor operation here asks for it anew:
with Python's 5 ms, traces took minutes to write."""
_CHECK_EVERY = 32


@dataclass(frozen=True)
class Tokens:
    """Describes the token ids and positions of the armed rows: int64 [2, rows]."""


@dataclass(frozen=True)
class HeadCall:
    """Describes a call of the LM head, with an empty tensor: `rows` in all, those of `group` among them."""

    group: int
    rows: int


@dataclass(frozen=True)
class NewNames:
    """Names that the forward thread has numbered since the recording before."""

    operators: Tuple[Tuple[str, int, str, Optional[str], Optional[int]], ...]
    arguments: Tuple[str, ...]
    dtypes: Tuple[str, ...]


@dataclass(frozen=True)
class Limits:
    folder: Path
    free_floor_bytes: int
    size_cap_bytes: int


@dataclass
class _Open:
    """A sampler's result that waits for its requests' next forwards."""

    taken: Taken
    forward: int
    first_row: int
    waiting: Dict[str, int]
    """Rows among the forward's armed rows by request id, not decided yet."""
    kept: List[int]


class RecordingWriter:
    """The thread and its queue. `trouble` gets the first exception; what comes after it is dropped."""

    def __init__(self, writer: TraceWriter, limits: Limits, trouble: Callable[[BaseException], None]) -> None:
        self._writer = writer
        self._limits = limits
        self._trouble = trouble
        self._queue: "deque[Tuple[NewNames, Taken, bool]]" = deque()
        # Each counted by one thread alone.
        self._put_bytes = self._done_bytes = 0
        self._latest_put_s = 0.0
        self._forward_runs = False
        self._closing = threading.Event()
        self._broken: Optional[str] = None
        self._written = 0
        self._latest = (0, 0)
        self._state = StateTables(writer)
        self._opened: List[_Open] = []
        self._thread = threading.Thread(target=self._work, name="klbench-trace", daemon=True)
        self._thread.start()

    # Any thread.

    def forward_begins(self) -> None:
        """What is recorded now will be handed over."""
        self._forward_runs = True

    def put(self, names: NewNames, taken: Taken, sampled: bool) -> None:
        """Hands over a recording, or what the sampler added to the one before. Waits for room."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._put_bytes - self._done_bytes > _QUEUE_BYTES and self._broken is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the trace could not be written for {_PATIENCE_S:.0f} s")
            time.sleep(0.001)
        self._queue.append((names, taken, sampled))
        self._put_bytes += taken.host.numel() * 8
        self._latest_put_s = time.monotonic()
        self._forward_runs = False

    def close(
        self,
        observes_state: bool,
        observes_head: bool,
        invalid: Optional[str],
        not_observed: Sequence[str],
        unseen: Optional[torch.Tensor] = None,
        missed: Optional[NewNames] = None,
    ) -> None:
        """Writes all that was handed over and completes the trace; `unseen` is as UnseenWrites.table says.

        `missed` has names of operators that no recording has, where there are any.
        """
        self._closing.set()
        self._thread.join()
        if unseen is not None and len(unseen):
            self._writer.add_columns("unseen", unseen)
        if missed is not None:
            self._take_names(missed)
        self._writer.close(observes_state, observes_head, invalid or self._broken, not_observed)

    # The writer thread.

    def _work(self) -> None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, _SWITCH_S))
        try:
            self._write_all()
        finally:
            sys.setswitchinterval(before)

    def _write_all(self) -> None:
        while not self._closing.wait(_POLL_S):
            while self._queue and self._may_work():
                self._take_one()
        while self._queue:
            self._take_one()
        if self._broken is None:
            self._try(self._decide_all)

    def _may_work(self) -> bool:
        full = 2 * (self._put_bytes - self._done_bytes) > _QUEUE_BYTES
        if full or self._closing.is_set():
            return True
        return not self._forward_runs and time.monotonic() - self._latest_put_s > _QUIET_S

    def _take_one(self) -> None:
        item = self._queue.popleft()
        if self._broken is None:
            self._try(lambda: self._write(*item))
        self._done_bytes += item[1].host.numel() * 8

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            self._trouble(error)

    def _take_names(self, names: NewNames) -> None:
        for operator in names.operators:
            self._writer.operator(*operator)
        for argument in names.arguments:
            self._writer.argument(argument)
        for dtype in names.dtypes:
            self._writer.dtype(dtype)

    def _write(self, names: NewNames, taken: Taken, sampled: bool) -> None:
        self._take_names(names)
        if self._written % _CHECK_EVERY == 0:
            self._check_space()
        self._written += 1
        if sampled:
            self._write_sampled(taken)
        else:
            self._decide(taken)
            self._write_forward(taken)

    def _check_space(self) -> None:
        free = shutil.disk_usage(str(self._limits.folder)).free
        if free < self._limits.free_floor_bytes:
            raise OSError(f"{free} bytes are free, less than the floor of {self._limits.free_floor_bytes}")
        if self._writer.written_bytes > self._limits.size_cap_bytes:
            raise OSError(
                f"{self._writer.written_bytes} bytes written pass the cap of {self._limits.size_cap_bytes}"
            )

    def _write_forward(self, taken: Taken) -> None:
        sums, extras = taken.arrived()
        composition = taken.composition
        forward = self._writer.add_forward(composition.number, composition.rows, len(composition.parts))
        rows = self._add_rows(forward, taken, extras)
        first_row = rows[0] if rows else 0
        self._latest = (forward, first_row)
        layout, digests = _layout(taken, sums)
        lists = [[first_row + place for place in members] for members in taken.lists]
        if layout:
            self._writer.add_packed(forward, layout, first_row, len(rows), lists, digests)
        for call in (what for what, _ in extras if isinstance(what, HeadCall)):
            members = rows if call.group == ROWS else lists[call.group - 2]
            self._writer.add_columns("head", torch.tensor([[row, call.rows] for row in members]))
        self._state.add(taken, extras, forward, first_row)

    def _add_rows(self, forward: int, taken: Taken, extras: Sequence[Tuple[Any, torch.Tensor]]) -> List[int]:
        tokens, positions = next(v for what, v in extras if isinstance(what, Tokens)).tolist()
        numbers = []
        index = 0
        for _, part in taken.rows.parts:
            end = index + part.rows
            expected = list(range(part.first_position, part.first_position + part.rows))
            if positions[index:end] != expected:
                raise RuntimeError(
                    f"forward {taken.composition.number}: the rows of {part.rid} are elsewhere"
                )
            assert part.parsed is not None
            arm, request = part.parsed.arm, part.parsed.request
            for row, (position, token) in enumerate(zip(expected, tokens[index:end], strict=True), part.row):
                number = self._writer.add_row(forward, arm, request, position, row, part.phase, token)
                numbers.append(number)
            index = end
        return numbers

    # The sampler's results.

    def _write_sampled(self, taken: Taken) -> None:
        forward, first_row = self._latest
        members = range(len(taken.rows.in_batch)) if not taken.lists else taken.lists[0]
        opened = _Open(taken, forward, first_row, {}, [])
        ends = _last_rows(taken)
        for member in members:
            part = ends[member]
            if part.phase == "decode":
                opened.kept.append(member)
            else:
                opened.waiting[part.rid] = member
        self._opened.append(opened)
        self._write_decided()

    def _decide(self, taken: Taken) -> None:
        """A request that goes on with another chunk threw the sampled token away."""
        phases = {part.rid: part.phase for part in taken.composition.parts if part.rid}
        for opened in self._opened:
            for rid in [rid for rid in opened.waiting if rid in phases]:
                member = opened.waiting.pop(rid)
                if phases[rid] not in ("chunk", "resumed"):
                    opened.kept.append(member)
        self._write_decided()

    def _decide_all(self) -> None:
        for opened in self._opened:
            opened.kept += opened.waiting.values()
            opened.waiting = {}
        self._write_decided()

    def _write_decided(self) -> None:
        for opened in [opened for opened in self._opened if not opened.waiting]:
            self._opened.remove(opened)
            taken = opened.taken
            members = list(range(len(taken.rows.in_batch))) if not taken.lists else list(taken.lists[0])
            chosen = [place for place, member in enumerate(members) if member in opened.kept]
            if not chosen:
                continue
            sums, _ = taken.arrived()
            layout, digests = _layout(taken, sums)
            every = len(chosen) == len(taken.rows.in_batch)
            group = ROWS if every else ROWS + 1
            layout = tuple((*entry[:6], group, entry[7]) for entry in layout)
            digests = digests.reshape(-1, len(members), 2)[:, chosen].reshape(-1, 2)
            rows = [opened.first_row + members[place] for place in chosen]
            self._writer.add_packed(
                opened.forward,
                layout,
                opened.first_row,
                len(taken.rows.in_batch),
                [] if every else [rows],
                digests,
            )


def _last_rows(taken: Taken) -> Dict[int, Part]:
    """The armed requests by the place of their last row among the armed rows."""
    ends = {}
    place = 0
    for _, part in taken.rows.parts:
        place += part.rows
        ends[place - 1] = part
    return ends


def _layout(taken: Taken, sums: torch.Tensor) -> Tuple[Tuple[Tuple[int, ...], ...], torch.Tensor]:
    """The forward's entries and the digests of its pieces, piece after piece."""
    counts = [taken.pieces[number].rows for number in taken.order]
    widths = torch.repeat_interleave(
        torch.tensor([taken.pieces[number].row_bytes for number in taken.order], dtype=torch.int64),
        torch.tensor(counts, dtype=torch.int64),
    )
    digests = finished(sums, widths)
    part_of: Dict[int, torch.Tensor] = {}
    place = 0
    for number, count in zip(taken.order, counts, strict=True):
        part_of[number] = digests[place : place + count]
        place += count
    parts = [part_of[number] for number in range(len(taken.pieces))]
    if not parts:
        return taken.entries, torch.zeros((0, 2), dtype=torch.int64)
    if taken.versions_told:
        return taken.entries, torch.cat(parts)
    return _without_repetition(taken, parts)


def _without_repetition(
    taken: Taken, parts: List[torch.Tensor]
) -> Tuple[Tuple[Tuple[int, ...], ...], torch.Tensor]:
    """The same with pieces of the same digests once: the output of one operator as the input of the next."""
    renumbered: List[int] = []
    known: Dict[Any, int] = {}
    kept: List[torch.Tensor] = []
    for piece, own in zip(taken.pieces, parts, strict=True):
        ends = (piece.group, piece.rows, *own[0].tolist(), *own[-1].tolist()) if piece.rows else None
        same = known.get(ends) if ends is not None and piece.group != WHOLE else None
        if same is None or not torch.equal(kept[same], own):
            same = len(kept)
            if ends is not None:
                known.setdefault(ends, same)
            kept.append(own)
        renumbered.append(same)
    return tuple((*entry[:7], renumbered[entry[7]]) for entry in taken.entries), torch.cat(kept)
