"""How many tokens of an arm the server has worked off, read without touching it where that is possible.

Our own servers say it in their log: one line per prefill batch, one per some decode steps of all running
requests. Reading a log changes no batch. Where there is no log the load counters are asked now and then. A
server with our plugin also shows each forward of ours in the plugin's log (insitu/composition.py).

Invariant: a server is called stuck only where its work would have been seen. Log lines depend on its log
level and interval, gauges of its load can stand still while it works, /v1/loads may be missing or refused:
then it is said, once, that progress cannot be seen, and nothing is given up.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from klbench.core.columns import ArmName
from klbench.engine.client import Load, ServerClient
from klbench.errors import DeadlineError

_LONGEST_LINE_BYTES = 1 << 16
_READ_BYTES = 4 << 20
_LOOK_EVERY_S = 0.25
_ASK_EVERY_S, _ASK_LATER_S = 1.0, 2.0
"""The server answers between two steps, which then wait: in a long arm it is asked less often."""
_RATE_REPORTS = 4
_STALLED_S = 180.0
"""So long without progress is said; prefill of the longest prompts, and a decode report, take seconds."""
_GIVE_UP_S = 1800.0
_PATIENCE = 3.0
"""A silence is judged only when it is so many times as long as any that ended with progress."""


class ArmObserver(Protocol):
    """Hears how an arm goes; all of it in the event loop, none of it may block."""

    def arm_started(self, arm: ArmName, requests: int, tokens: int) -> None: ...

    def arm_progress(
        self, arm: ArmName, done: int, total: int, elapsed_s: float, eta_s: float | None
    ) -> None: ...

    def arm_stalled(self, arm: ArmName, silent_s: float) -> None: ...

    def arm_unseen(self, arm: ArmName, why: str) -> None:
        """Whether the server works cannot be seen; at most once for each arm."""

    def arm_ended(self, arm: ArmName, elapsed_s: float) -> None: ...


class LogTail:
    """The lines that a growing file got since the last look. A line that never ends is cut."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        if from_end:
            try:
                self._offset = path.stat().st_size
            except OSError:
                self._offset = 0

    def lines(self) -> list[str]:
        """New whole lines; none while the file is not there."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset, os.SEEK_SET)
                new = file.read(_READ_BYTES)
        except OSError:
            return []
        self._offset += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        if len(self._rest) > _LONGEST_LINE_BYTES:
            whole.append(self._rest[:_LONGEST_LINE_BYTES])
            self._rest = b""
        return [line[:_LONGEST_LINE_BYTES].decode("utf-8", errors="replace") for line in whole]


_PREFILL = re.compile(r"Prefill batch.*?#new-token: (\d+).*?#cached-token: (\d+)")
_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+)")
_RETRACTED = re.compile(r"KV cache pool is full\. Retract requests|#retracted_reqs: (\d+)")


class TokenCounter:
    """Adds up the tokens in the log's batch lines. `decode_interval` is the server's decode_log_interval."""

    def __init__(self, decode_interval: int) -> None:
        self._decode_interval = decode_interval
        self.tokens = 0
        self.decode_lines = 0
        self.retractions = 0

    def feed(self, line: str) -> None:
        if found := _PREFILL.search(line):
            self.tokens += int(found.group(1)) + int(found.group(2))
        elif found := _DECODE.search(line):
            self.tokens += int(found.group(1)) * self._decode_interval
            self.decode_lines += 1
        elif _RETRACTED.search(line):
            self.retractions += 1


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look at a server shows of the arm that runs on it."""

    tokens: int
    """Worked off as far as is known; never more than was done."""
    sign: Hashable = None
    """Another value than before where the server was seen to work."""
    blind: str = ""
    """Why work need not show up here; empty where it would have."""


Look = Callable[[], Awaitable[Seen]]


def shows_batches(log: Path) -> bool:
    """Whether the log's beginning has a prefill line: sglang's warm-up makes one unless lines are off."""
    return any(_PREFILL.search(line) for line in LogTail(log).lines())


def _size(log: Path | None) -> int:
    """Bytes of the plugin's log of forwards; it grows before each forward of ours."""
    try:
        return log.stat().st_size if log is not None else 0
    except OSError:
        return 0


def from_log(
    log: Path, decode_interval: int, *, forwards: Path | None = None, shows_prefill: bool = False
) -> Look:
    """Counts from the log's end as it is now. `shows_prefill`: prefill batches are known to have lines."""
    tail, counter = LogTail(log, from_end=True), TokenCounter(decode_interval)
    before = _size(forwards)

    async def look() -> Seen:
        for line in tail.lines():
            counter.feed(line)
        written = _size(forwards)
        would_show = written > before or counter.decode_lines or (shows_prefill and not counter.tokens)
        why = "its log has no lines of batches (--log-level, --decode-log-interval), the plugin's none either"
        return Seen(counter.tokens, written, "" if would_show else why)

    return look


def from_load(client: ServerClient, hear: Callable[[Load], None], *, forwards: Path | None = None) -> Look:
    """The most tokens that were seen in use at once: less exact than a log, and never more than was done.

    `hear` gets each answer of the server about its load. Bytes of an answer of ours that come are a sign too.
    """
    began, asked_at, most = time.monotonic(), 0.0, 0
    latest: Load | None = None
    known: Load | None = None
    before = _size(forwards)

    async def look() -> Seen:
        nonlocal asked_at, most, latest, known
        pause_s = min(max((time.monotonic() - began) / 10, _ASK_EVERY_S), _ASK_LATER_S)
        if time.monotonic() - asked_at >= pause_s:
            latest = await client.load()
            asked_at = time.monotonic()
            if latest is not None:
                hear(latest)
                known, most = latest, max(most, latest.used_tokens)
        written = _size(forwards)
        if written > before or (latest is not None and latest.computed_rows):
            blind = ""
        elif latest is None:
            blind = "its /v1/loads gives no answer: it is missing there, or refused"
        else:
            blind = "its /v1/loads counts no forwards, and what it counts can stand still while it works"
        return Seen(most, (known, client.answer_bytes, written), blind)

    return look


async def watch_arm(arm: ArmName, total: int, look: Look, observer: ArmObserver) -> None:
    """Reports progress until it is cancelled; a report only when something moved.

    Raises DeadlineError when nothing has moved for half an hour though it would have been seen: a server may
    answer health checks and still work on nothing. Where it would not, the observer hears that once.
    """
    started = moved_at = said_at = judged_at = quiet_from = time.monotonic()
    longest_s = 0.0
    before: Seen | None = None
    unseen_said = False
    # Prefill is many times faster than decode, so only the recent rate says how long the rest takes.
    recent: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=_RATE_REPORTS)
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        seen = await look()
        done, now = min(seen.tokens, total), time.monotonic()
        if done != recent[-1][1] or (before is not None and seen.sign != before.sign):
            longest_s = max(longest_s, now - moved_at)
            moved_at = now
        before = seen
        if done != recent[-1][1]:
            elapsed_s = now - started
            then_s, then = recent[0]
            eta_s = (elapsed_s - then_s) * (total - done) / (done - then) if done > then else None
            recent.append((elapsed_s, done))
            observer.arm_progress(arm, done, total, elapsed_s, eta_s)
        if seen.blind:
            quiet_from = now
            if not unseen_said and now - max(moved_at, judged_at) > _STALLED_S:
                unseen_said = True
                observer.arm_unseen(arm, seen.blind)
            continue
        judged_at = now
        silent_s = now - max(moved_at, quiet_from)
        if silent_s > max(_GIVE_UP_S, _PATIENCE * longest_s):
            raise DeadlineError(
                f"the server made no progress in the {arm} arm for {silent_s / 60:.0f} minutes",
                why=f"{done} of {total} tokens are done",
                next="look at the server's log, start the server again, and continue",
            )
        if min(silent_s, now - said_at) > max(_STALLED_S, _PATIENCE * longest_s):
            said_at = now
            observer.arm_stalled(arm, silent_s)
