"""Waiting for a started server: its phases, and each way in which a start goes wrong with its next step.

A start ends in one of four ways: the server is ready; it ended; it goes on but cannot become ready (its port
was taken, its scheduler died and left the parent waiting); or the time is up.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from klbench.engine.advice import advice
from klbench.engine.client import ServerClient
from klbench.engine.phases import Phases, last_lines, own_error
from klbench.engine.process import Ended, ServerProcess
from klbench.engine.progress import LogTail
from klbench.errors import DeadlineError, ServerError

_SILENT_S = 300.0
_LOOK_EVERY_S = 0.2
_ASK_EVERY_S = 1.0
_SHOWN_LINE = 200
_CRASH_GRACE_S = 20.0
"""A scheduler's exception takes the whole server down within a few seconds; later it will not any more."""

# uvicorn: [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use
_PORT_TAKEN = re.compile(r"attempting to bind on address .*address already in use", re.IGNORECASE)
_SCHEDULER_CRASH = re.compile(r"cheduler hit an exception")


class ServerObserver(Protocol):
    """Hears how a server goes; called in the event loop, must not block."""

    def starting(self, command: str, log: Path, ready_to_capture: bool, fault: str | None) -> None: ...

    def phase(self, phase: str, elapsed_s: float, detail: str) -> None: ...

    def call(self, line: str, outcome: str, elapsed_s: float) -> None: ...

    def keep_body(self, content: bytes) -> Path | None:
        """Keeps the body of a call that is too long for a line, and says where; None to keep none."""

    def warning(self, what: str, why: str, next: str) -> None: ...


class Unobserved:
    """Hears nothing."""

    def starting(self, *_: object) -> None: ...

    def phase(self, *_: object) -> None: ...

    def call(self, *_: object) -> None: ...

    def keep_body(self, *_: object) -> Path | None:
        return None

    def warning(self, *_: object) -> None: ...


class LaunchError(ServerError):
    """A server that did not become ready, or died: how it ended and where its log is."""

    def __init__(self, what: str, *, why: str, next: str, ended: Ended, log: Path) -> None:
        super().__init__(what, why=why, next=next)
        self.ended = ended
        self.log = log


class PortTakenError(LaunchError):
    """Somebody else took the port between its choice and the server's own bind."""


_PORT_TRIES = 3
Started = TypeVar("Started")


async def on_a_free_port(
    start: Callable[[], Awaitable[Started]], observe: ServerObserver, *, ours: bool
) -> Started:
    """What `start` returns; it is called again when its port was taken between the choice and the bind.

    Only where the port was `ours` to choose, and three times in all; then PortTakenError is raised.
    """
    for left in reversed(range(_PORT_TRIES)):
        try:
            return await start()
        except PortTakenError as error:
            if not ours or not left:
                raise
            observe.warning(error.what, error.why, "started again on another port")
    raise AssertionError


def next_step(error: str, log: Path, otherwise: str) -> str:
    """What to do about a server's own error: known advice, or `otherwise`; and where its log is."""
    return f"{advice(error) or otherwise}; the whole log: {log}"


async def wait_ready(
    process: ServerProcess, client: ServerClient, observe: ServerObserver, limit_s: float
) -> None:
    """Returns when the server is ready.

    Raises PortTakenError, LaunchError when it ended or cannot become ready any more, DeadlineError when
    `limit_s` is up. The process is left as it is.
    """
    await _Wait(process, client, observe, limit_s).until_ready()


class _Wait:
    def __init__(
        self, process: ServerProcess, client: ServerClient, observe: ServerObserver, limit_s: float
    ) -> None:
        self._process = process
        self._client = client
        self._observe = observe
        self._limit_s = limit_s
        self._phases = Phases()
        self._tail = LogTail(process.spec.log)
        self._heard_at = self._asked_at = time.monotonic()
        self._warned = False
        self._crashed_at: float | None = None

    @property
    def _doing(self) -> str:
        return self._phases.phase.replace("_", " ")

    async def until_ready(self) -> None:
        self._observe.phase(self._phases.phase, 0.0, "")
        while True:
            self._read_log()
            if self._phases.phase == "ready":
                return
            self._check_alive()
            self._check_crashed()
            self._check_time()
            # A server that was told to log less says nothing when it is ready.
            if time.monotonic() - self._asked_at > _ASK_EVERY_S:
                self._asked_at = time.monotonic()
                if await self._client.is_up():
                    self._phases.is_ready()
                    self._observe.phase("ready", self._process.elapsed_s, "the server answers")
                    return
            await asyncio.sleep(_LOOK_EVERY_S)

    def _read_log(self) -> None:
        for line in self._tail.lines():
            self._heard_at, self._warned = time.monotonic(), False
            if _PORT_TAKEN.search(line):
                self._observe.phase("failed", self._process.elapsed_s, line[:_SHOWN_LINE])
                raise PortTakenError(
                    "the server's port was taken by another program while it started",
                    why=line[:_SHOWN_LINE],
                    next=next_step(line, self._process.spec.log, "start it again"),
                    ended=self._given_up(line[:_SHOWN_LINE]),
                    log=self._process.spec.log,
                )
            if _SCHEDULER_CRASH.search(line) and self._crashed_at is None:
                self._crashed_at = time.monotonic()
            if (phase := self._phases.feed(line)) is not None:
                self._observe.phase(phase, self._process.elapsed_s, line[:_SHOWN_LINE])

    def _check_alive(self) -> None:
        if self._process.alive:
            return
        ended = self._process.ended()
        self._observe.phase("failed", self._process.elapsed_s, ended.why)
        raise LaunchError(
            f"the server ended while {self._doing}",
            why=ended.why,
            next=next_step(
                "\n".join((ended.why, *ended.last_lines)), self._process.spec.log, "mend what it names"
            ),
            ended=ended,
            log=self._process.spec.log,
        )

    def _check_crashed(self) -> None:
        if self._crashed_at is None or time.monotonic() - self._crashed_at < _CRASH_GRACE_S:
            return
        error = own_error(self._process.log_tail())
        why = error.headline if error is not None else "a scheduler hit an exception"
        self._observe.phase("failed", self._process.elapsed_s, why)
        raise LaunchError(
            f"the server's scheduler crashed while {self._doing}, and the rest of it goes on waiting",
            why=why,
            next=next_step(why, self._process.spec.log, "mend what it names"),
            ended=self._given_up(why),
            log=self._process.spec.log,
        )

    def _given_up(self, why: str) -> Ended:
        """How a server ends that still runs but cannot become ready."""
        return Ended(False, None, why, tuple(last_lines(self._process.log_tail())))

    def _check_time(self) -> None:
        words = last_lines(self._process.log_tail(), 3)
        if self._process.elapsed_s > self._limit_s:
            raise DeadlineError(
                f"the server was not ready within {self._limit_s:.0f} s; it was {self._doing}",
                why="its last words: " + " / ".join(words) if words else "it said nothing at all",
                next=f"allow more with --launch-timeout; the whole log: {self._process.spec.log}",
            )
        if time.monotonic() - self._heard_at > _SILENT_S and not self._warned:
            self._warned = True
            self._observe.warning(
                f"no sign of life from the server for {_SILENT_S / 60:.0f} minutes",
                f"it is {self._doing}; its last words: " + " / ".join(words[-1:]),
                "wait, or stop it; --launch-timeout limits the wait",
            )
