"""How many tokens of an arm the server has worked off, read without touching it where that is possible.

Our own servers say it in their log: one line per prefill batch, one per some decode steps of all running
requests. Reading a log changes no batch. Where there is no log the load counters are asked now and then.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable
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


class ArmObserver(Protocol):
    """Hears how an arm goes; all of it in the event loop, none of it may block."""

    def arm_started(self, arm: ArmName, requests: int, tokens: int) -> None: ...

    def arm_progress(
        self, arm: ArmName, done: int, total: int, elapsed_s: float, eta_s: float | None
    ) -> None: ...

    def arm_stalled(self, arm: ArmName, silent_s: float) -> None: ...

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
        self.retractions = 0

    def feed(self, line: str) -> None:
        if found := _PREFILL.search(line):
            self.tokens += int(found.group(1)) + int(found.group(2))
        elif found := _DECODE.search(line):
            self.tokens += int(found.group(1)) * self._decode_interval
        elif _RETRACTED.search(line):
            self.retractions += 1


TokensDone = Callable[[], Awaitable[int]]


def from_log(log: Path, decode_interval: int) -> TokensDone:
    """Counts from the log's end as it is now."""
    tail, counter = LogTail(log, from_end=True), TokenCounter(decode_interval)

    async def tokens_done() -> int:
        for line in tail.lines():
            counter.feed(line)
        return counter.tokens

    return tokens_done


def from_load(client: ServerClient, hear: Callable[[Load], None]) -> TokensDone:
    """The most tokens that were seen in use at once: less exact than a log, and never more than was done.

    `hear` gets each answer of the server about its load.
    """
    began, asked_at, most = time.monotonic(), 0.0, 0

    async def tokens_done() -> int:
        nonlocal asked_at, most
        pause_s = min(max((time.monotonic() - began) / 10, _ASK_EVERY_S), _ASK_LATER_S)
        if time.monotonic() - asked_at >= pause_s:
            load = await client.load()
            asked_at = time.monotonic()
            if load is not None:
                hear(load)
                most = max(most, load.used_tokens)
        return most

    return tokens_done


async def watch_arm(arm: ArmName, total: int, tokens_done: TokensDone, observer: ArmObserver) -> None:
    """Reports progress until it is cancelled; a report only when something moved.

    Raises DeadlineError when nothing has moved for half an hour: a server may answer health checks and still
    work on nothing.
    """
    started = moved_at = said_at = time.monotonic()
    # Prefill is many times faster than decode, so only the recent rate says how long the rest takes.
    recent: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=_RATE_REPORTS)
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        done = min(await tokens_done(), total)
        now = time.monotonic()
        if done == recent[-1][1]:
            if now - moved_at > _GIVE_UP_S:
                raise DeadlineError(
                    f"the server made no progress in the {arm} arm for {_GIVE_UP_S / 60:.0f} minutes",
                    why=f"{done} of {total} tokens are done",
                    next="look at the server's log, start the server again, and continue",
                )
            if now - max(moved_at, said_at) > _STALLED_S:
                said_at = now
                observer.arm_stalled(arm, now - moved_at)
            continue
        moved_at = now
        elapsed_s = now - started
        then_s, then = recent[0]
        eta_s = (elapsed_s - then_s) * (total - done) / (done - then) if done > then else None
        recent.append((elapsed_s, done))
        observer.arm_progress(arm, done, total, elapsed_s, eta_s)
