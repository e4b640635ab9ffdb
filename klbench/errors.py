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

    @property
    def meaning(self) -> str:
        """In a few words."""
        return _MEANINGS[self][0]

    @property
    def in_full(self) -> str:
        """With what the commands mean by it."""
        return _MEANINGS[self][1] or self.meaning


_MEANINGS: dict[ExitCode, tuple[str, str]] = {
    ExitCode.CONSISTENT: ("consistent", "consistent; the workbench was left"),
    ExitCode.DIVERGED: (
        "divergence found",
        "divergence found; `locate`: at least one origin, `census`: an operator that depends on the number "
        "of rows, `compare`: something differs, `run --like --same-verdict`: another verdict, `experiment`: "
        "repeats that differ, `calibrate`: a floor above zero, `selftest`: a wrong answer, `doctor`: "
        "something is broken",
    ),
    ExitCode.USAGE: ("usage", "usage: a command, its input or the configuration is wrong"),
    ExitCode.NO_SERVER: ("server not available", "no server could be started or reached"),
    ExitCode.DEADLINE: ("timeout", "a limit that was set has passed"),
    ExitCode.UNDECIDED: (
        "could not answer",
        "could not answer: a helper was not run or is inconclusive, a divergence without an origin, "
        "nothing diverges and an experiment has no answer, sessions that cannot be compared, or a disk that "
        "is full or read-only",
    ),
    ExitCode.INTERNAL: ("internal error", "a defect of klbench; a file with the details is named"),
    ExitCode.HUNG_UP: ("hung up", "hung up: the terminal has gone"),
    ExitCode.INTERRUPTED: ("interrupted", ""),
    ExitCode.READER_GONE: ("the reader has gone", "the reader of the output has gone"),
    ExitCode.TERMINATED: ("terminated", ""),
}


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
