"""The event log of a session: appended first, seen second.

    {"seq": 12, "at": 1764444444.25, "event": {"type": "arm_started", ...}, "crc": 2774532811}

`crc` is the CRC-32 of the event's bytes: a line whose event was damaged is known for it, not half believed.
Invariants: one writer (who holds the session's lock); a line is one `write` of the whole line, so a killed
process leaves whole lines and at most one part at the end; a reader takes whole lines only and a writer cuts
such a part off before it goes on. A line that cannot be understood is no error, for the rest of the log still
opens: a newer version's event comes as `Unknown`, a damaged line as `Damaged`.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Union

import msgspec

from klbench.errors import UndecidedError
from klbench.session import events
from klbench.session.events import EVENT_TYPES, Damaged, Event, Unknown

MAX_LINE_BYTES = 16 * 1024 * 1024
"""Longest line a reader takes. The largest event, a located origin with its map, stays under 1 MiB."""

POLL_S = 0.2
"""How often a tail looks at the file: below what an eye notices, and a `stat` costs microseconds."""

_READ_BYTES = 4 * 1024 * 1024
_NO_EVENT = "it is no event"
_TOO_LONG = f"it is longer than {MAX_LINE_BYTES} bytes"

# What is flushed to the disk at once: facts that a power failure must not take. The rest (progress, calls)
# reaches the kernel with every append, which is enough to survive the death of any process.
_DURABLE = (
    events.RunnerStarted,
    events.RunnerEnded,
    events.ServerReady,
    events.ServerEnded,
    events.RunStarted,
    events.HelperEnded,
    events.RunEnded,
    events.Located,
    events.ReportWritten,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One event in its place: `seq` counts from 1, `at` is seconds since the epoch."""

    seq: int
    at: float
    event: Event


class _Line(msgspec.Struct):
    seq: int
    at: float
    event: msgspec.Raw
    crc: int | None = None


class _Tagged(msgspec.Struct):
    type: str = ""


_line_decoder = msgspec.json.Decoder(_Line)
_event_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Union[EVENT_TYPES])  # noqa: UP007
_tag_decoder = msgspec.json.Decoder(_Tagged)
_encoder = msgspec.json.Encoder()


def encode_line(seq: int, at: float, event: object) -> bytes:
    """One line of a log, without its line feed."""
    content = _encoder.encode(event)
    return _encoder.encode(_Line(seq, at, msgspec.Raw(content), zlib.crc32(content)))


def decode_line(line: bytes, number: int, seq: int) -> Entry:
    """The entry of the file's line with that number (from 1); `seq` is for a line that cannot tell its own.

    An event of another version's type comes back as `Unknown`, a damaged line as `Damaged`.
    """
    if len(line) > MAX_LINE_BYTES:
        return Entry(seq, 0.0, Damaged(line=number, why=_TOO_LONG))
    try:
        outer = _line_decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Entry(seq, 0.0, Damaged(line=number, why=_NO_EVENT))
    if outer.crc is not None and outer.crc != zlib.crc32(outer.event):
        return Entry(outer.seq, outer.at, Damaged(line=number, why="its checksum is another one"))
    try:
        event = _event_decoder.decode(outer.event)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        name = _tag(outer.event)
        event = Unknown(name=name) if name else Damaged(line=number, why=_NO_EVENT)
    return Entry(outer.seq, outer.at, event)


def _tag(raw: msgspec.Raw) -> str:
    try:
        return _tag_decoder.decode(raw).type
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


class LogTail:
    """Reads a log as it grows. `poll` never blocks on a writer and never sees a part of a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._seq = 0
        self._line = 0
        self._part = b""
        self._skipping = False

    def poll(self) -> list[Entry]:
        """The entries appended since the last call, at most a few MiB of them; [] when there are none."""
        entries: list[Entry] = []
        while not entries and (data := self._read()):
            entries.extend(self._take(data))
        return entries

    def _read(self) -> bytes:
        try:
            if os.stat(self._path).st_size <= self._offset:
                return b""
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read(_READ_BYTES)
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data

    def _take(self, data: bytes) -> Iterator[Entry]:
        *whole, part = (self._part + data).split(b"\n")
        for line in whole:
            self._line += 1
            if self._skipping:
                # The end of a line whose beginning was already given up.
                self._skipping = False
                continue
            if line.strip():
                entry = decode_line(line, self._line, self._seq + 1)
                self._seq = entry.seq
                yield entry
        if len(part) > MAX_LINE_BYTES:
            if not self._skipping:
                self._seq += 1
                yield Entry(self._seq, 0.0, Damaged(line=self._line + 1, why=_TOO_LONG))
            self._skipping, part = True, b""
        self._part = part

    def drain(self) -> list[Entry]:
        """Everything that is there now."""
        entries = []
        while batch := self.poll():
            entries.extend(batch)
        return entries

    async def follow(self, *, poll_s: float = POLL_S) -> AsyncIterator[list[Entry]]:
        """Yields the new entries whenever there are some, without end."""
        # Heavy, and most commands only read what is there.
        import asyncio

        while True:
            if entries := self.poll():
                yield entries
            else:
                await asyncio.sleep(poll_s)


def each_entry(path: Path) -> Iterator[Entry]:
    """The whole entries of a log one after the other, a few MiB of them in memory at a time."""
    tail = LogTail(path)
    while batch := tail.poll():
        yield from batch


def read_log(path: Path) -> list[Entry]:
    """All whole entries of a log, whatever its last line looks like."""
    return list(each_entry(path))


class EventLog:
    """The one writer of a session's log.

    `on_append` is called with every entry after it is in the file; what it raises is the caller's defect.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self.on_append: Callable[[Entry], None] | None = None
        self._clock = clock
        self._seq = _mend(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)

    def append(self, event: Event) -> Entry:
        """Writes the event and returns its entry. Raises UndecidedError when it is too long, OSError when
        the disk refuses."""
        entry = Entry(self._seq + 1, self._clock(), event)
        line = encode_line(entry.seq, entry.at, event) + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise UndecidedError(
                f"an event of {len(line)} bytes does not fit the event log",
                why=f"lines are at most {MAX_LINE_BYTES} bytes",
                next="please report this as a defect of klbench",
            )
        _write_whole(self._file, line)
        self._seq = entry.seq
        if isinstance(event, _DURABLE):
            os.fsync(self._file)
        if self.on_append is not None:
            self.on_append(entry)
        return entry

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _write_whole(file: int, line: bytes) -> None:
    """One write where the system allows it; on a full disk the part that went out is taken back."""
    start = os.lseek(file, 0, os.SEEK_END)
    done = 0
    try:
        while done < len(line):
            done += os.write(file, line[done:])
    except OSError:
        if done:
            os.ftruncate(file, start)
        raise


def _mend(path: Path) -> int:
    """Cuts off the part of a line that a killed writer left; returns the last sequence number."""
    if not path.exists():
        return 0
    last = max((entry.seq for entry in each_entry(path)), default=0)
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)
    return last
