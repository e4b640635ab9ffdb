"""What a capture is going to write, said before it begins; where that is much, the user is asked first.

    note: the capture writes about 41.2 MB in 34 forwards · 12.0 GB are free in /scratch/traces, its arms took
    0:04 when they were measured: recorded, longer

Invariants: nothing is written before the answer; a small capture never asks; of the captures of one job only
one that writes more than was agreed to asks again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from klbench.core.text import counted, elapsed, size
from klbench.engine.forecast import Forecast
from klbench.session import events as ev
from klbench.session.work import JobView, Session

ASK_FROM_BYTES = 10 << 30
ASK_FROM_PART = 4
"""Asked is from 10 GiB on, and from a quarter of what is free: a full disk is everybody's trouble."""
_LESS = "--trace-dir DIR names a larger disk; fewer and shorter prompts that still diverge write less"


def is_much(size_bytes: int, free_bytes: int) -> bool:
    """Whether the user is asked before so much is written where so much is free."""
    return size_bytes > ASK_FROM_BYTES or ASK_FROM_PART * size_bytes > free_bytes


class CaptureForecasts:
    """Says what each capture of a job will write; `capture` and `confirm` take it as `beforehand`."""

    def __init__(self, session: Session, job: JobView, place: Path, arms_s: float | None) -> None:
        """`arms_s`: what the arms that are repeated took when they were measured, where that is known."""
        self._session = session
        self._job = job
        self._place = place
        self._arms_s = arms_s
        self._said: set[str] = set()
        self._agreed_bytes = 0

    async def __call__(self, expected: Forecast, free_bytes: int) -> None:
        """Says the forecast, once for all captures that are alike. Raises UsageError where it is much and
        nobody is there to agree."""
        much = f"about {size(expected.size_bytes)} in {counted(expected.forwards, 'forward')}"
        free = f"{size(free_bytes)} are free in {self._place}"
        if much not in self._said:
            self._said.add(much)
            took = ""
            if self._arms_s is not None and self._arms_s >= 1:
                took = f", its arms took {elapsed(self._arms_s)} when they were measured: recorded, longer"
            self._note(f"the capture writes {much}", free + took)
        agreed = self._session.start.options.yes_capture or expected.size_bytes <= self._agreed_bytes
        if agreed or not is_much(expected.size_bytes, free_bytes):
            return
        try:
            await self._job.ask(f"capture {much}", f"{free}; {_LESS}", agree_with="--yes-capture")
        except asyncio.CancelledError:
            self._note("nothing was captured", "its size was not agreed to", _LESS)
            raise
        self._agreed_bytes = expected.size_bytes

    def _note(self, what: str, why: str, step: str = "") -> None:
        self._session.emit(ev.Trouble(level="note", what=what, why=why, next=step))
