"""What state_reads.py saw of a forward, as rows of the trace's tables `read` and `slot`.

Slot rows are written when they tell something: a position that was just computed (written and read), and one
whose bits are not what was last seen there for this request (read): all of them at a request's first forward,
and later only what somebody changed.
"""

from collections import OrderedDict
from typing import Any, Dict, Sequence, Tuple

import torch

from .digest import finished
from .recording import Taken
from .state_reads import KvLook, KvRead, KvSlots, MetadataLook, RecurrentLook
from .trace_writer import TraceWriter

_REMEMBERED_BYTES = 512 << 20
_WRITTEN, _READ, _WRITTEN_AND_READ = 0, 1, 2


class StateTables:
    """Writes through one TraceWriter, in the writer's thread; remembers what each request saw."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._seen: "OrderedDict[Tuple[str, int, int], torch.Tensor]" = OrderedDict()
        self._seen_bytes = 0

    def add(
        self, taken: Taken, extras: Sequence[Tuple[Any, torch.Tensor]], forward: int, first_row: int
    ) -> None:
        """Adds what `extras` hold of state; the forward's armed rows begin at `first_row` of the trace."""
        slots: Dict[int, Tuple[KvSlots, torch.Tensor]] = {}
        for what, values in extras:
            if isinstance(what, KvSlots):
                slots[what.plan] = (what, values)
            elif isinstance(what, KvRead):
                self._add_reads(what, values, taken, first_row)
            elif isinstance(what, KvLook):
                self._add_slots(what, values, taken, forward, *slots[what.plan])
            elif isinstance(what, MetadataLook):
                self._add_metadata(what, values, taken, first_row)
            elif isinstance(what, RecurrentLook):
                self._add_recurrent(what, values, taken, forward, first_row)

    def _add_reads(self, what: KvRead, values: torch.Tensor, taken: Taken, first_row: int) -> None:
        """values: int64 [halves, arguments, rows]."""
        high = torch.cat(
            [torch.arange(part.first_position, part.seq_len) + 1 for _, part in taken.rows.parts]
        )
        low = torch.zeros_like(high) if what.window is None else (high - 1 - what.window).clamp_(min=0)
        row = torch.arange(len(high)) + first_row
        for place, argument in enumerate(what.arguments):
            columns = [row, _like(row, what.operator), _like(row, argument), low, high]
            self._writer.add_columns("read", torch.stack(columns, dim=1), values[:, place].t().contiguous())

    def _add_metadata(self, what: MetadataLook, values: torch.Tensor, taken: Taken, first_row: int) -> None:
        """values: int64 [requests], the verdict of each in the place of a digest."""
        rows = torch.tensor([part.rows for _, part in taken.rows.parts], dtype=torch.int64)
        high = torch.cat(
            [torch.arange(part.first_position, part.seq_len) + 1 for _, part in taken.rows.parts]
        )
        row = torch.arange(len(high)) + first_row
        columns = [row, _like(row, what.operator), _like(row, what.argument), torch.zeros_like(high), high]
        verdict = torch.repeat_interleave(values, rows)
        digests = torch.stack([verdict, torch.zeros_like(verdict)], dim=1)
        self._writer.add_columns("read", torch.stack(columns, dim=1), digests)

    def _add_slots(
        self,
        what: KvLook,
        values: torch.Tensor,
        taken: Taken,
        forward: int,
        about: KvSlots,
        slots: torch.Tensor,
    ) -> None:
        """values: int64 [halves, arguments, n]."""
        own = 0
        for span in about.spans:
            part = taken.rows.parts[span.part][1]
            count = span.high - span.first if what.own_rows_only else span.high - span.low
            begin = own if what.own_rows_only else span.start
            own += count
            position = torch.arange(span.high - count, span.high)
            pool = slots[span.start + span.high - span.low - count : span.start + span.high - span.low]
            kind = torch.where(position >= span.first, _WRITTEN_AND_READ, _READ)
            for place, argument in enumerate(what.arguments):
                seen = values[:, place, begin : begin + count]
                news = self._changed(part.rid, what.operator, argument, position, seen) | (kind != _READ)
                chosen = torch.nonzero(news).flatten()
                if not len(chosen):
                    continue
                assert part.parsed is not None
                like = position[chosen]
                columns = [
                    kind[chosen],
                    _like(like, forward),
                    _like(like, what.operator),
                    _like(like, argument),
                    _like(like, what.event),
                    _like(like, part.parsed.request),
                    like,
                    pool[chosen],
                ]
                digests = finished(seen[:, chosen], what.row_bytes[place])
                self._writer.add_columns("slot", torch.stack(columns, dim=1), digests)

    def _changed(
        self, rid: str, operator: int, argument: int, position: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """Where `seen` [2, n] is not what was last seen at these positions; it is remembered now."""
        first, end = int(position[0]), int(position[-1]) + 1
        key = (rid, operator, argument)
        known = self._seen.pop(key, None)
        if known is None or known.shape[1] < end:
            grown = torch.zeros((3, max(end + 64, end * 5 // 4)), dtype=torch.int64)
            if known is not None:
                grown[:, : known.shape[1]] = known
                self._seen_bytes -= known.numel() * 8
            known = grown
            self._seen_bytes += known.numel() * 8
        self._seen[key] = known
        here = known[:, first:end]
        changed = (here[0] == 0) | (here[1:] != seen).any(dim=0)
        here[0] = 1
        here[1:] = seen
        while self._seen_bytes > _REMEMBERED_BYTES and len(self._seen) > 1:
            _, forgotten = self._seen.popitem(last=False)
            self._seen_bytes -= forgotten.numel() * 8
        return changed

    def _add_recurrent(
        self, what: RecurrentLook, values: torch.Tensor, taken: Taken, forward: int, first_row: int
    ) -> None:
        """values: int64 [3, requests]: pool slot, low, high."""
        digests = finished(values[1:], what.row_bytes)
        row = first_row
        for place, (_, part) in enumerate(taken.rows.parts):
            assert part.parsed is not None
            own_row, row = row, row + part.rows
            # Without a prefix there is no state: the slot holds what its last owner left.
            if not what.written and part.first_position == 0:
                continue
            position = part.seq_len - 1 if what.written else part.first_position - 1
            kind = _WRITTEN if what.written else _READ
            digest = digests[place : place + 1]
            slot = [kind, forward, what.operator, what.argument, what.event, part.parsed.request]
            self._writer.add_columns("slot", torch.tensor([[*slot, position, int(values[0, place])]]), digest)
            if not what.written:
                read = [own_row, what.operator, what.argument, 0, part.first_position]
                self._writer.add_columns("read", torch.tensor([read]), digest)


def _like(values: torch.Tensor, number: int) -> torch.Tensor:
    return torch.full_like(values, number)
