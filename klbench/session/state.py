"""A session as its readers see it: a pure fold of its events into one frozen snapshot.

    state = SessionState()
    for entry in read_log(path):
        state = state.apply(entry)

Invariants: the same entries give the same state, whoever folds them and in however many steps; `apply` costs
a few small allocations (nothing grows with the number of tokens); an event that is not understood changes
nothing but `seq`. Times: `*_at` are seconds since the epoch, `*_s` are durations in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from klbench.session import events as ev
from klbench.session.log import Entry

KEPT_CALLS = 500
"""How many of the latest calls a snapshot holds; the log itself keeps all."""
KEPT_TROUBLES = 200


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


@dataclass(frozen=True, slots=True)
class SessionState:
    """Everything that a reader of the session knows after `seq` events."""

    seq: int = 0
    at: float = 0.0
    """When the last event happened."""
    runner: RunnerState = field(default_factory=RunnerState)
    server: ServerState = field(default_factory=ServerState)
    job: JobState | None = None
    """The job in progress, None when idle."""
    last_job: JobState | None = None
    """The latest job that ended."""
    question: Question | None = None
    runs: tuple[RunState, ...] = ()
    located: tuple[LocatedState, ...] = ()
    reports: tuple[str, ...] = ()
    """Report files, relative to the session folder or absolute; the newest last."""
    troubles: tuple[TroubleLine, ...] = ()
    calls: tuple[CallLine, ...] = ()
    unknown_events: int = 0
    """Events that this version does not understand: the log is damaged or newer."""

    @property
    def run(self) -> RunState | None:
        """The latest run."""
        return self.runs[-1] if self.runs else None

    @property
    def latest_located(self) -> LocatedState | None:
        return self.located[-1] if self.located else None

    def apply(self, entry: Entry) -> SessionState:
        """The state after one more event."""
        state = replace(self, seq=entry.seq, at=entry.at or self.at)
        return _fold(state, entry.event, entry.at)


def fold(entries: Iterable[Entry], state: SessionState | None = None) -> SessionState:
    """The state after all entries."""
    state = state or SessionState()
    for entry in entries:
        state = state.apply(entry)
    return state


def _fold(state: SessionState, event: ev.Event, at: float) -> SessionState:
    match event:
        case ev.RunnerStarted():
            return _runner_started(state, event, at)
        case ev.RunnerEnded():
            runner = replace(state.runner, alive=False, ended=event.reason)
            return replace(_interrupted(state), runner=runner)
        case ev.ServerStarting() | ev.ServerPhase() | ev.ServerReady() | ev.ServerEnded():
            return replace(state, server=_server(state.server, event, at))
        case ev.JobStarted():
            return replace(state, job=JobState(event.job, event.kind, event.title, at), question=None)
        case ev.JobProgress():
            return _job_progress(state, event)
        case ev.JobEnded():
            if state.job is None or state.job.number != event.job:
                return state
            ended = replace(state.job, outcome=event.outcome, elapsed_s=event.elapsed_s)
            return replace(state, job=None, last_job=ended, question=None)
        case ev.RunStarted():
            helpers = tuple(HelperState(name) for name in event.helpers)
            run = RunState(event.run, at, event.prompts, event.options, helpers)
            return replace(state, runs=(*state.runs, run))
        case ev.ArmStarted() | ev.ArmProgress() | ev.ArmEnded() | ev.HelperEnded() | ev.TokenTexts():
            return _in_helper(state, event, at)
        case ev.RunEnded():
            return _in_run(state, event)
        case ev.Located():
            located = LocatedState(
                event.locate, event.run, event.helper, event.request, event.result, event.elapsed_s, at
            )
            return replace(state, located=(*state.located, located))
        case ev.ReportWritten():
            return replace(state, reports=(*state.reports, *event.files))
        case ev.Asked():
            return replace(state, question=Question(event.what, event.why))
        case ev.Answered():
            return replace(state, question=None)
        case ev.Trouble():
            line = TroubleLine(at, event.level, event.what, event.why, event.next)
            return replace(state, troubles=(*state.troubles, line)[-KEPT_TROUBLES:])
        case ev.Call():
            call = CallLine(at, event.line, event.outcome, event.elapsed_s)
            return replace(state, calls=(*state.calls, call)[-KEPT_CALLS:])
        case _:
            return replace(state, unknown_events=state.unknown_events + 1)


def _interrupted(state: SessionState) -> SessionState:
    """The state once its runner is known to be gone: nothing is in progress, a server of ours is no more."""
    job, last = state.job, state.last_job
    if job is not None:
        last = replace(job, outcome="cancelled")
    runs = state.runs
    if runs and not runs[-1].ended:
        helpers = tuple(
            replace(helper, stopped=True) if helper.result is None else helper for helper in runs[-1].helpers
        )
        runs = (*runs[:-1], replace(runs[-1], helpers=helpers))
    server = state.server
    if server.phase not in ("none", "failed", "stopped"):
        server = replace(server, phase="stopped")
    return replace(state, job=None, last_job=last, question=None, runs=runs, server=server)


def without_runner(state: SessionState) -> SessionState:
    """The same session, seen after its runner turned out to be dead without having said so."""
    if not state.runner.alive:
        return state
    runner = replace(state.runner, alive=False, ended="it was killed, or its machine went down")
    return replace(_interrupted(state), runner=runner)


def _runner_started(state: SessionState, event: ev.RunnerStarted, at: float) -> SessionState:
    state = _interrupted(state)
    runner = RunnerState(True, event.pid, event.host, event.klbench_version, at, event.target, event.options)
    return replace(state, runner=runner, server=ServerState(launch_s=state.server.launch_s))


_ServerEvent = ev.ServerStarting | ev.ServerPhase | ev.ServerReady | ev.ServerEnded


def _server(server: ServerState, event: _ServerEvent, at: float) -> ServerState:
    match event:
        case ev.ServerStarting():
            return ServerState(
                phase="starting",
                phase_at=at,
                command=event.command,
                log=event.log,
                ready_to_capture=event.ready_to_capture,
                fault=event.fault,
                launch_s=server.launch_s,
            )
        case ev.ServerPhase():
            began = server.phase_at if event.phase == server.phase else at
            return replace(
                server, phase=event.phase, phase_at=began, elapsed_s=event.elapsed_s, detail=event.detail
            )
        case ev.ServerReady():
            return replace(
                server,
                phase="ready",
                phase_at=at,
                elapsed_s=event.launch_s,
                facts=event.server,
                url=event.url,
                launch_s=event.launch_s,
                differs=tuple(event.differs),
                notes=tuple(event.notes),
                ended=None,
            )
        case ev.ServerEnded():
            end = ServerEnd(event.expected, event.exit_code, event.why, tuple(event.last_lines))
            return replace(server, phase="stopped" if event.expected else "failed", phase_at=at, ended=end)


def _job_progress(state: SessionState, event: ev.JobProgress) -> SessionState:
    if state.job is None or state.job.number != event.job:
        return state
    job = replace(state.job, phase=event.phase, done=event.done, total=event.total, eta_s=event.eta_s)
    return replace(state, job=job)


_HelperEvent = ev.ArmStarted | ev.ArmProgress | ev.ArmEnded | ev.HelperEnded | ev.TokenTexts


def _in_helper(state: SessionState, event: _HelperEvent, at: float) -> SessionState:
    """Applies the event to its helper of its run, which is nearly always the latest one."""
    for index in range(len(state.runs) - 1, -1, -1):
        run = state.runs[index]
        if run.number != event.run:
            continue
        helpers = tuple(
            _helper(helper, event, at) if helper.helper == event.helper else helper for helper in run.helpers
        )
        runs = (*state.runs[:index], replace(run, helpers=helpers), *state.runs[index + 1 :])
        return replace(state, runs=runs)
    return state


def _helper(helper: HelperState, event: _HelperEvent, at: float) -> HelperState:
    match event:
        case ev.ArmStarted():
            arm = ArmState(event.arm, event.requests, event.tokens, at, total=event.tokens)
            others = tuple(known for known in helper.arms if known.arm != event.arm)
            return replace(helper, arms=(*others, arm), stopped=False)
        case ev.ArmProgress() | ev.ArmEnded():
            arms = tuple(_arm(arm, event) if arm.arm == event.arm else arm for arm in helper.arms)
            return replace(helper, arms=arms)
        case ev.HelperEnded():
            return replace(helper, result=event.result, columns=event.columns, elapsed_s=event.elapsed_s)
        case ev.TokenTexts():
            return replace(helper, texts=event.file)


def _arm(arm: ArmState, event: ev.ArmProgress | ev.ArmEnded) -> ArmState:
    if isinstance(event, ev.ArmEnded):
        return replace(arm, ended=True, done=arm.total, elapsed_s=event.elapsed_s, eta_s=0.0)
    return replace(arm, done=event.done, total=event.total, elapsed_s=event.elapsed_s, eta_s=event.eta_s)


def _in_run(state: SessionState, event: ev.RunEnded) -> SessionState:
    runs = tuple(
        replace(
            run,
            verdict=event.verdict,
            elapsed_s=event.elapsed_s,
            cancelled=event.cancelled,
            helpers=tuple(replace(h, stopped=h.result is None) for h in run.helpers),
        )
        if run.number == event.run
        else run
        for run in state.runs
    )
    return replace(state, runs=runs)
