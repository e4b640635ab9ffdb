"""Errors and exit codes: one shape in the terminal, on the command line and in reports.

    KlbenchError            what happened, why, what to do next; its exit code
    ├── UsageError          2   the command or its input is wrong
    ├── ServerError         3   no server could be started or reached
    ├── DeadlineError       4   a limit that the user set has passed
    └── UndecidedError      5   the question could not be answered

Every error a user may meet is one of these; anything else is a defect (exit code 70).
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process says to its caller; a stable contract."""

    CONSISTENT = 0
    DIVERGED = 1
    USAGE = 2
    NO_SERVER = 3
    DEADLINE = 4
    UNDECIDED = 5
    INTERNAL = 70
    HUNG_UP = 129
    INTERRUPTED = 130
    READER_GONE = 141
    TERMINATED = 143


class KlbenchError(Exception):
    """Something a user can act on: `what` happened, `why`, and what to do `next`."""

    exit_code = ExitCode.UNDECIDED

    def __init__(self, what: str, *, why: str = "", next: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.next = next

    def as_dict(self) -> dict[str, str]:
        """The `error` object of every `--json` document."""
        return {"what": self.what, "why": self.why, "next": self.next}


class UsageError(KlbenchError):
    exit_code = ExitCode.USAGE


class ServerError(KlbenchError):
    exit_code = ExitCode.NO_SERVER


class DeadlineError(KlbenchError):
    exit_code = ExitCode.DEADLINE


class UndecidedError(KlbenchError):
    exit_code = ExitCode.UNDECIDED
