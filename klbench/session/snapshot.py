"""The parts of a session's snapshot: frozen, made by state.py alone.

Times: `*_at` are seconds since the epoch, `*_s` are durations in seconds. Text from servers, models
and files is untrusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RunnerState:
    """Who works on the session."""

    alive: bool = False
    """Started and not ended, by its own word. A killed runner cannot say so: `link.find_runner` judges."""
    pid: int = 0
    host: str = ""
    klbench_version: str = ""
    started_at: float = 0.0
    target: Mapping[str, Any] = field(default_factory=dict)
    """`Target` of request.py as a dictionary: kind demo, launch or url."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`Options` of request.py as a dictionary."""
    ended: str | None = None
    """Why it ended."""


@dataclass(frozen=True, slots=True)
class ServerEnd:
    """How the server went: `expected` when we stopped it."""

    expected: bool
    exit_code: int | None
    why: str
    last_lines: tuple[str, ...]
    """The server's own last words; untrusted text."""


@dataclass(frozen=True, slots=True)
class CodeState:
    """A git checkout with what was changed in it: file names relative to `root`, hash of their content."""

    root: str
    commit: str
    subject: str
    changed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerState:
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
    facts: Mapping[str, Any] = field(default_factory=dict)
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


@dataclass(frozen=True, slots=True)
class JobState:
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


@dataclass(frozen=True, slots=True)
class ArmState:
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


@dataclass(frozen=True, slots=True)
class HelperState:
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


@dataclass(frozen=True, slots=True)
class RunState:
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

    @property
    def ended(self) -> bool:
        return self.elapsed_s is not None

    def helper(self, name: str) -> HelperState | None:
        return next((helper for helper in self.helpers if helper.helper == name), None)


@dataclass(frozen=True, slots=True)
class LocatedState:
    """What one locate job found; `result` is the body of klbench.locate/1 with `around` and `map`."""

    number: int
    run: int | None
    helper: str
    request: int
    result: Mapping[str, Any]
    elapsed_s: float
    at: float


@dataclass(frozen=True, slots=True)
class CensusState:
    """Which operators are batch-invariant; `result` is the body of klbench.census/1."""

    number: int
    result: Mapping[str, Any]
    elapsed_s: float
    at: float


@dataclass(frozen=True, slots=True)
class ExperimentState:
    """What one experiment showed; `result` has name, outcome, text, values and meaning."""

    number: int
    run: int | None
    helper: str
    name: str
    result: Mapping[str, Any]
    elapsed_s: float
    at: float


@dataclass(frozen=True, slots=True)
class TroubleLine:
    """An error (level "error") or a warning that a user should see."""

    at: float
    level: str
    what: str
    why: str
    next: str


@dataclass(frozen=True, slots=True)
class CallLine:
    """One HTTP call or process, as a line that can be copied and repeated."""

    at: float
    line: str
    outcome: str
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Question:
    """What the runner waits for a `Confirm` (or `Cancel`) command for."""

    what: str
    why: str
