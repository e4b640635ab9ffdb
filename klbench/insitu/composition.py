"""What each forward was made of: which requests, which of their rows, and how those rows came to be there.

One line of `forwards-<rank>.jsonl` in the control folder for each forward that holds a request of klbench,
always, so that a capture can be compared with the measured run:

    {"n": 12, "mode": "extend", "rows": 300, "requests": [["klb-a1b2-7g+-0", 0, 300, 0, 300, "extend"]]}
    {"n": 13, "mode": "decode", "rows": 1, "requests": [["klb-a1b2-7g+-0", 300, 1, 300, 301, "decode"]]}
    {"n": 14, "mode": "decode", "rows": 1, "again": true}

Where the fault lab has planted something, `"faults": ["key-write:layer=1,..."]` says what was armed.

`n` counts the forwards of this process. A request is [id, first position, rows, prefix length, sequence
length after the forward, phase]; the id of foreign traffic is "". `again` stands for the requests of the line
before, each one position further. Phases are those of the trace: extend, chunk, restored, decode, resumed.
Positions of decode rows are counted, not read from the device: no forward waits for the GPU because of us.
"""

import functools
import json
import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from .private import file_mode
from .rids import RequestId, parse_rid

_REMEMBERED_REQUESTS = 65536
ARMED_FAULTS = "klbench_armed_faults"
"""Attribute of the model runner: what the fault lab has armed, spelled as in its catalogue."""


class Part(NamedTuple):
    """The rows of one request in one forward; `row` is where they begin in the batch."""

    rid: str
    first_position: int
    rows: int
    prefix_len: int
    seq_len: int
    phase: str
    row: int
    parsed: Optional[RequestId]

    def as_list(self) -> List[Any]:
        return [self.rid, self.first_position, self.rows, self.prefix_len, self.seq_len, self.phase]


@dataclass(frozen=True)
class Composition:
    """One forward: all its requests in batch order, and all its rows, padding included."""

    number: int
    mode: str
    rows: int
    parts: List[Part]

    @property
    def armed(self) -> List[Part]:
        return [part for part in self.parts if part.parsed is not None and part.parsed.armed]

    def as_dict(self) -> Dict[str, Any]:
        return {
            "n": self.number,
            "mode": self.mode,
            "rows": self.rows,
            "requests": [part.as_list() for part in self.parts],
        }

    def follows(self, earlier: "Optional[Composition]") -> bool:
        """Whether this is the decode step after `earlier`: the same requests, each one position further."""
        return (
            earlier is not None
            and self.mode == earlier.mode == "decode"
            and self.rows == earlier.rows
            and len(self.parts) == len(earlier.parts)
            and all(
                now.rid == then.rid and now.first_position == then.first_position + 1
                for now, then in zip(self.parts, earlier.parts, strict=True)
            )
        )


@dataclass
class _Known:
    tokens: int
    decoded: bool
    resumed: bool
    step: int
    """The latest step when it last ran."""


class RequestHistory:
    """What is remembered of each request between its forwards: enough to tell the phases apart.

    The second chunk of a cold request has a prefix too, but exactly the tokens it had after its last forward;
    a restored prefix belongs to a request whose first forward this is. A request that has decoded and is
    extended again by anything but the next token was retracted, and so was one that missed a *step*: a decode
    or mixed forward, in which all that generate take part.

    A mixed batch begins with what is extended, a request's further chunk first of all, and ends with those
    that generate; so its first request is not one of them, even with one row.
    """

    def __init__(self) -> None:
        self._known: "OrderedDict[str, _Known]" = OrderedDict()
        self._steps = 0

    def step(self) -> None:
        """Notes that a decode or mixed forward begins, whoever takes part in it."""
        self._steps += 1

    def extend(self, rid: str, prefix_len: int, rows: int, mixed: bool, first: bool = False) -> str:
        """Notes `rows` rows behind a prefix; returns their phase. `first`: no request comes before it."""
        known = self._known.get(rid)
        seq_len = prefix_len + rows
        if known is None:
            self._remember(rid, _Known(seq_len, False, False, self._steps))
            return "restored" if prefix_len else "extend"
        goes_on = known.tokens == prefix_len
        missed_no_step = known.step >= self._steps - mixed
        known.tokens, known.step = seq_len, self._steps
        generates = known.decoded or (mixed and not first)
        if goes_on and rows == 1 and missed_no_step and generates:
            known.decoded = True
            return "decode"
        if known.decoded or not goes_on:
            known.resumed, known.decoded = True, False
        return "resumed" if known.resumed else "chunk"

    def decode(self, rid: str) -> Optional[int]:
        """Notes one decode row; returns the sequence length after it, None for an unknown request."""
        known = self._known.get(rid)
        if known is None:
            return None
        known.tokens += 1
        known.step = self._steps
        known.decoded, known.resumed = True, False
        return known.tokens

    def decode_from(self, rid: str, seq_len: int) -> None:
        """Notes a decode row of a request that was not seen before."""
        self._remember(rid, _Known(seq_len, True, False, self._steps))

    def _remember(self, rid: str, known: _Known) -> None:
        self._known[rid] = known
        if len(self._known) > _REMEMBERED_REQUESTS:
            self._known.popitem(last=False)


class CompositionReader:
    """Reads compositions out of sglang's ForwardBatch; counts forwards and remembers requests."""

    def __init__(self, nonce: str) -> None:
        self._prefix = f"klb-{nonce}-"
        # Each decode step holds the same ids again.
        self._parsed = functools.lru_cache(maxsize=_REMEMBERED_REQUESTS)(lambda rid: parse_rid(rid, nonce))
        self._history = RequestHistory()
        self._number = 0

    @property
    def number(self) -> int:
        """Of the forward that was read last, whoever took part in it."""
        return self._number

    def read(self, batch: Any) -> Optional[Composition]:
        """The composition of a forward about to run; None where it holds no request of ours."""
        self._number += 1
        rids, mode = batch.rids, batch.forward_mode
        if rids and (mode.is_decode() or mode.is_mixed()):
            self._history.step()
        if not rids or not any(rid.startswith(self._prefix) for rid in rids):
            return None
        rows = int(batch.input_ids.shape[0])
        name = str(mode.name).lower()
        if mode.is_decode():
            parts = self._decode_parts(batch, rids)
        elif batch.extend_seq_lens_cpu is not None and batch.extend_prefix_lens_cpu is not None:
            parts = self._extend_parts(batch, rids, bool(mode.is_mixed()))
        else:
            parts = []
        return Composition(self._number, name, rows, parts)

    def _decode_parts(self, batch: Any, rids: List[str]) -> List[Part]:
        parts = []
        seq_lens: Optional[List[int]] = None
        for row, rid in enumerate(rids):
            seq_len = self._history.decode(rid)
            if seq_len is None:
                if seq_lens is None:
                    seq_lens = [int(length) for length in batch.seq_lens.tolist()]
                seq_len = seq_lens[row]
                self._history.decode_from(rid, seq_len)
            parts.append(self._part(rid, seq_len - 1, 1, seq_len - 1, "decode", row))
        return parts

    def _extend_parts(self, batch: Any, rids: List[str], mixed: bool) -> List[Part]:
        parts = []
        row = 0
        for index, rid in enumerate(rids):
            prefix_len = int(batch.extend_prefix_lens_cpu[index])
            rows = int(batch.extend_seq_lens_cpu[index])
            phase = self._history.extend(rid, prefix_len, rows, mixed, first=index == 0)
            parts.append(self._part(rid, prefix_len, rows, prefix_len, phase, row))
            row += rows
        return parts

    def _part(self, rid: str, first: int, rows: int, prefix_len: int, phase: str, row: int) -> Part:
        parsed = self._parsed(rid)
        shown = rid if parsed is not None else ""
        return Part(shown, first, rows, prefix_len, first + rows, phase, row, parsed)


class CompositionLog:
    """Appends compositions to a file, a line each, whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.fchmod(self._file, file_mode(path.parent))
        self._latest: Optional[Composition] = None
        self._latest_faults: Sequence[str] = ()

    def append(self, composition: Composition, faults: Sequence[str] = ()) -> None:
        """Appends a forward and the faults that were armed during it."""
        content: Dict[str, Any]
        if composition.follows(self._latest) and faults == self._latest_faults:
            content = {"n": composition.number, "mode": "decode", "rows": composition.rows, "again": True}
        else:
            content = composition.as_dict()
            if faults:
                content["faults"] = list(faults)
        self._latest, self._latest_faults = composition, faults
        line = json.dumps(content)
        os.write(self._file, line.encode("ascii") + b"\n")
