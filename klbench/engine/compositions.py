"""Which rows shared each forward: the plugin's log of compositions, and whether a capture repeated a run.

Faults that depend on the row count or on the place in the batch appear and vanish with the batch, so a
capture is the same experiment only where the chosen request's forwards had the same rows in the same order.
Format: klbench/insitu/composition.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from klbench.core.text import counted
from klbench.errors import KlbenchError
from klbench.insitu.rids import RequestId, parse_rid

_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one request in a forward; `rid` is None for foreign traffic."""

    rid: RequestId | None
    first_position: int
    rows: int
    prefix_len: int
    seq_len: int
    phase: str

    def one_further(self) -> Part:
        return replace(
            self,
            first_position=self.first_position + 1,
            prefix_len=self.prefix_len + 1,
            seq_len=self.seq_len + 1,
        )


@dataclass(frozen=True, slots=True)
class Composition:
    """One forward of one rank."""

    number: int
    mode: str
    rows: int
    parts: tuple[Part, ...]
    faults: tuple[str, ...] = ()
    """What the fault lab had armed."""

    def part_of(self, passes: Collection[int], arm: str, request: int) -> Part | None:
        """The rows of a request in one of `passes`, None where it takes no part."""
        for part in self.parts:
            rid = part.rid
            if rid is not None and rid.number in passes and (rid.arm, rid.request) == (arm, request):
                return part
        return None

    @property
    def shape(self) -> tuple[Any, ...]:
        """What must repeat: mode, rows, and each request's rows in order, whatever pass it belongs to."""
        return (
            self.mode,
            self.rows,
            tuple(
                (-1 if part.rid is None else part.rid.request, part.first_position, part.rows)
                for part in self.parts
            ),
        )


class _Line(msgspec.Struct):
    n: int
    mode: str
    rows: int
    requests: list[tuple[str, int, int, int, int, str]] = []
    again: bool = False
    faults: tuple[str, ...] = ()


def read_compositions(
    path: Path, nonce: str, passes: Collection[int], *, begin_bytes: int = 0
) -> list[Composition]:
    """All logged forwards with a request of one of `passes`, in order. A last line that is not whole yet is
    left out. `begin_bytes`: how long the log was before. Raises KlbenchError that names file and line."""
    wanted = frozenset(passes)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise KlbenchError(f"{path} is too large to read", why=f"more than {_MAX_BYTES} bytes")
        return [
            composition
            for composition in _lines(path, nonce, begin_bytes)
            if any(part.rid is not None and part.rid.number in wanted for part in composition.parts)
        ]
    except OSError as error:
        raise KlbenchError(f"{path} cannot be read", why=str(error)) from error


def _lines(path: Path, nonce: str, begin_bytes: int) -> Iterator[Composition]:
    decoder = msgspec.json.Decoder(_Line)
    latest: tuple[Part, ...] = ()
    faults: tuple[str, ...] = ()
    with path.open("rb") as file:
        file.seek(begin_bytes)
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                line = decoder.decode(text)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise KlbenchError(f"{path}, line {number} is no composition", why=str(error)) from error
            if line.again:
                latest = tuple(part.one_further() for part in latest)
            else:
                latest = tuple(
                    Part(parse_rid(rid, nonce), first, rows, prefix_len, seq_len, phase)
                    for rid, first, rows, prefix_len, seq_len, phase in line.requests
                )
                faults = line.faults
            yield Composition(line.n, line.mode, line.rows, latest, faults)


@dataclass(frozen=True, slots=True)
class Repetition:
    """How far the forwards of the chosen request repeated those of the measured run."""

    forwards: int
    same: int
    first_difference: str | None
    """The first forward that was made of something else, in words."""

    @property
    def repeated(self) -> bool:
        return self.forwards > 0 and self.same == self.forwards

    def as_dict(self) -> dict[str, Any]:
        return {"forwards": self.forwards, "same": self.same, "first_difference": self.first_difference}


def compare_compositions(
    measured: Sequence[Composition],
    measured_passes: Collection[int],
    captured: Sequence[Composition],
    captured_passes: Collection[int],
    request: int,
) -> Repetition:
    """Compares each captured forward of the request with the measured one that computed the same rows."""
    forwards = same = 0
    difference: str | None = None
    for arm in ("warming", "generation", "scoring"):
        before = {
            (part.first_position, part.rows): composition.shape
            for composition in measured
            if (part := composition.part_of(measured_passes, arm, request)) is not None
        }
        for composition in captured:
            part = composition.part_of(captured_passes, arm, request)
            if part is None:
                continue
            forwards += 1
            known = before.get((part.first_position, part.rows))
            if known == composition.shape:
                same += 1
            elif difference is None:
                difference = f"{arm} arm, position {part.first_position}: " + _difference(known, composition)
    return Repetition(forwards, same, difference)


def _difference(known: tuple[Any, ...] | None, composition: Composition) -> str:
    if known is None:
        return "no measured forward computed just these rows of the request"
    if known[1] != composition.rows:
        return f"{counted(known[1], 'row')} in the measured forward, {composition.rows} in the captured one"
    return "as many rows, but of other requests or in another order"
