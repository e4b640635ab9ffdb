"""The parts of a session's snapshot: frozen, made by state.py alone.

Times: `*_at` are seconds since the epoch, `*_s` are durations in seconds. Text from servers, models
and files is untrusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class RunnerState(msgspec.Struct, frozen=True):
    """Who works on the session."""

    alive: bool = False
    """Started and not ended, by its own word. A killed runner cannot say so: `reading.find_runner` judges."""
    pid: int = 0
    host: str = ""
    klbench_version: str = ""
    started_at: float = 0.0
    target: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """`Target` of request.py as a dictionary: kind demo, launch or url."""
    options: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """`Options` of request.py as a dictionary."""
    ended: str | None = None
    """Why it ended."""


KEPT_LINES = 100


class Damage(msgspec.Struct, frozen=True):
    """Lines of an event log that cannot be read: how many, and the numbers of the first."""

    count: int = 0
    lines: tuple[int, ...] = ()

    def with_line(self, line: int) -> Damage:
        kept = (*self.lines, line) if len(self.lines) < KEPT_LINES else self.lines
        return Damage(self.count + 1, kept)

    @property
    def in_words(self) -> str:
        """`3 lines of the event log are damaged (5, 7 to 8): what they told is missing`; empty for none."""
        if not self.count:
            return ""
        spans: list[list[int]] = []
        for line in self.lines:
            if spans and line == spans[-1][-1] + 1:
                spans[-1][1:] = [line]
            else:
                spans.append([line])
        numbers = ", ".join(" to ".join(map(str, span)) for span in spans[:12])
        more = ", ..." if len(spans) > 12 or self.count > len(self.lines) else ""
        subject = "line of the event log is" if self.count == 1 else "lines of the event log are"
        return f"{self.count} {subject} damaged ({numbers}{more}): what they told is missing"


class Controller(msgspec.Struct, frozen=True):
    """The terminal whose commands the runner takes."""

    client: str
    terminal: str
    pid: int
    since: float
    """Seconds since the epoch."""


class ServerEnd(msgspec.Struct, frozen=True):
    """How the server went: `expected` when we stopped it."""

    expected: bool
    exit_code: int | None
    why: str
    last_lines: tuple[str, ...]
    """The server's own last words; untrusted text."""


class CodeState(msgspec.Struct, frozen=True):
    """A git checkout with what was changed in it: file names relative to `root`, hash of their content."""

    root: str
    commit: str
    subject: str
    changed: Mapping[str, str] = msgspec.field(default_factory=dict)


class ServerState(msgspec.Struct, frozen=True):
    """The session's server; `phase` is "none" before the first launch or attach."""

    phase: str = "none"
    phase_at: float = 0.0
    """When this phase began."""
    elapsed_s: float = 0.0
    """Since the launch began, when the phase was seen."""
    detail: str = ""
    command: str = ""
    """The command as it can be copied and repeated; empty for an attached server."""
    log: str = ""
    """Its log file, relative to the session folder or absolute."""
    ready_to_capture: bool = False
    fault: str | None = None
    facts: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """`server` of klbench.run/1: what is in force. Empty until ready."""
    url: str = ""
    launch_s: float | None = None
    """What the last launch took: the cost of a relaunch."""
    differs: tuple[Mapping[str, str], ...] = ()
    """{"asked", "in_force"} for every setting that the server did not take as asked."""
    notes: tuple[str, ...] = ()
    ended: ServerEnd | None = None
    code: CodeState | None = None
    """sglang's checkout as it was when the server became ready; None for an installed package."""

    @property
    def ready(self) -> bool:
        return self.phase == "ready"


class JobState(msgspec.Struct, frozen=True):
    """The work in progress, or the last that ended (`outcome` is None while it goes on)."""

    number: int
    kind: str
    """launch, run, locate, report, relaunch."""
    title: str
    started_at: float
    phase: str = ""
    done: int = 0
    total: int = 0
    eta_s: float | None = None
    outcome: str | None = None
    """done, cancelled, failed."""
    elapsed_s: float | None = None


class ArmState(msgspec.Struct, frozen=True):
    """One pass over the prompts; `done` and `total` in tokens that the server has worked off."""

    arm: str
    requests: int
    tokens: int
    started_at: float
    done: int = 0
    total: int = 0
    elapsed_s: float = 0.0
    eta_s: float | None = None
    ended: bool = False


class HelperState(msgspec.Struct, frozen=True):
    """One helper of a run."""

    helper: str
    arms: tuple[ArmState, ...] = ()
    result: Mapping[str, Any] | None = None
    """The helper's object of klbench.run/1, once it has ended."""
    columns: str | None = None
    """Its npz file (columns.py), relative to the session folder."""
    texts: str | None = None
    """JSON file {"<token id>": text}, relative to the session folder."""
    elapsed_s: float = 0.0
    stopped: bool = False
    """The run ended before this helper did."""

    @property
    def status(self) -> str:
        """The result's status, else waiting, running or stopped."""
        if self.result is not None:
            return str(self.result.get("status", "error"))
        if self.stopped:
            return "stopped"
        return "running" if self.arms else "waiting"


class RunState(msgspec.Struct, frozen=True):
    """The execution of helpers on one server with one prompt set."""

    number: int
    started_at: float
    prompts: Mapping[str, Any]
    """{"source", "count", "sha256"}."""
    options: Mapping[str, Any]
    helpers: tuple[HelperState, ...]
    """In the order in which they run."""
    verdict: Mapping[str, Any] | None = None
    """The object of klbench.run/1, once the run has ended."""
    elapsed_s: float | None = None
    cancelled: bool = False
    prompts_file: str | None = None
    """The prompts as JSON lines of token ids, relative to the session folder."""
    server: ServerState | None = None
    """The server as it was when the run began (or went on)."""
    again_of: int | None = None
    """The earlier run that this one measures again to look further into it: helpers that it does not measure
    are that run's, and its findings and experiments count."""
    will_miss: tuple[Mapping[str, Any], ...] = ()
    """What was known before its helpers began that it will not put to the test: {"code", "text", "values",
    "advice"}; what it did miss is in its verdict."""

    @property
    def ended(self) -> bool:
        return self.elapsed_s is not None

    def helper(self, name: str) -> HelperState | None:
        return next((helper for helper in self.helpers if helper.helper == name), None)


class LocatedState(msgspec.Struct, frozen=True):
    """What one locate job found; `result` is the body of klbench.locate/1 with `around` and `map`."""

    number: int
    run: int | None
    helper: str
    request: int
    result: Mapping[str, Any]
    elapsed_s: float
    at: float
    replays: Mapping[int, Mapping[str, Any]] = msgspec.field(default_factory=dict)
    """By finding: the latest replay of its operator that was asked for since."""


class CensusState(msgspec.Struct, frozen=True):
    """Which operators are batch-invariant; `result` is the body of klbench.census/1."""

    number: int
    result: Mapping[str, Any]
    elapsed_s: float
    at: float


class ExperimentState(msgspec.Struct, frozen=True):
    """What one experiment showed; `result` has name, outcome, text, values and meaning."""

    number: int
    run: int | None
    helper: str
    name: str
    result: Mapping[str, Any]
    elapsed_s: float
    at: float


class TroubleLine(msgspec.Struct, frozen=True):
    """An error (level "error") or a warning that a user should see."""

    at: float
    level: str
    what: str
    why: str
    next: str


class CallLine(msgspec.Struct, frozen=True):
    """One HTTP call or process, as a line that can be copied and repeated."""

    at: float
    line: str
    outcome: str
    elapsed_s: float


class Question(msgspec.Struct, frozen=True):
    """What the runner waits for a `Confirm` (or `Cancel`) command for."""

    what: str
    why: str
