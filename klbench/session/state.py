"""A session as its readers see it: a pure fold of its events into one frozen snapshot.

    state = SessionState()
    for entry in read_log(path):
        state = state.apply(entry)

Invariants: the same entries give the same state, whoever folds them and in however many steps; `apply` costs
a few small allocations (nothing grows with the number of tokens); an event that is not understood changes
nothing but `seq`. Times: `*_at` are seconds since the epoch, `*_s` are durations in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from klbench.session import events as ev
from klbench.session.log import Entry
from klbench.session.snapshot import (
    ArmState,
    CallLine,
    CensusState,
    CodeState,
    Controller,
    Damage,
    ExperimentState,
    HelperState,
    JobState,
    LocatedState,
    Question,
    RunnerState,
    RunState,
    ServerEnd,
    ServerState,
    TroubleLine,
)

__all__ = [
    "ArmState",
    "CallLine",
    "CensusState",
    "CodeState",
    "Controller",
    "Damage",
    "ExperimentState",
    "HelperState",
    "JobState",
    "LocatedState",
    "Question",
    "RunState",
    "RunnerState",
    "ServerEnd",
    "ServerState",
    "SessionState",
    "TroubleLine",
    "fold",
    "without_runner",
]

KEPT_CALLS = 500
"""How many of the latest calls a snapshot holds; the log itself keeps all."""
KEPT_TROUBLES = 200
KEPT_RESULTS = 2000
"""Of runs, origins, censuses and experiments each: more than anybody makes, and a bound for a strange log."""


class SessionState(msgspec.Struct, frozen=True):
    """Everything that a reader of the session knows after `seq` events."""

    seq: int = 0
    at: float = 0.0
    """When the last event happened."""
    runner: RunnerState = msgspec.field(default_factory=RunnerState)
    controller: Controller | None = None
    """The terminal in control, None where nobody is."""
    server: ServerState = msgspec.field(default_factory=ServerState)
    job: JobState | None = None
    """The job in progress, None when idle."""
    last_job: JobState | None = None
    """The latest job that ended."""
    question: Question | None = None
    runs: tuple[RunState, ...] = ()
    located: tuple[LocatedState, ...] = ()
    censuses: tuple[CensusState, ...] = ()
    experiment_plan: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """The latest plan of experiments."""
    experiments: tuple[ExperimentState, ...] = ()
    reports: tuple[str, ...] = ()
    """Report files, relative to the session folder or absolute; the newest last."""
    troubles: tuple[TroubleLine, ...] = ()
    calls: tuple[CallLine, ...] = ()
    known_events: int = 0
    unknown_events: int = 0
    """Events that this version does not understand: the log is newer."""
    damage: Damage = msgspec.field(default_factory=Damage)
    """Lines of the log that cannot be read: what they told is missing."""

    @property
    def begun(self) -> bool:
        """Whether anything was done: a server started or reached, a helper run."""
        return self.server.phase != "none" or bool(self.runs)

    @property
    def run(self) -> RunState | None:
        """The latest run."""
        return self.runs[-1] if self.runs else None

    @property
    def latest_located(self) -> LocatedState | None:
        """The latest of the session, of whatever run."""
        return self.located[-1] if self.located else None

    @property
    def located_now(self) -> LocatedState | None:
        """The latest that speaks of the latest run: an origin of an earlier one may be mended since."""
        found = self.located_of(self.run)
        return found[-1] if found else None

    def located_of(self, run: RunState | None) -> tuple[LocatedState, ...]:
        """What was located in the run, or in one that it measures again."""
        runs = self._same_evidence(run)
        return tuple(one for one in self.located if one.run is None or one.run in runs)

    def experiments_of(self, run: RunState | None) -> tuple[ExperimentState, ...]:
        """The experiments on the run, or on one that it measures again."""
        runs = self._same_evidence(run)
        return tuple(one for one in self.experiments if one.run is None or one.run in runs)

    def _same_evidence(self, run: RunState | None) -> set[int]:
        known = {one.number: one for one in self.runs}
        numbers: set[int] = set()
        # A strange log may lead in a circle.
        while run is not None and run.number not in numbers:
            numbers.add(run.number)
            run = known.get(run.again_of) if run.again_of is not None else None
        return numbers

    @property
    def latest_census(self) -> CensusState | None:
        return self.censuses[-1] if self.censuses else None

    def apply(self, entry: Entry) -> SessionState:
        """The state after one more event."""
        seq, at = entry.seq, entry.at or self.at
        match entry.event:
            case ev.Damaged(line=line):
                return replace(self, seq=seq, at=at, damage=self.damage.with_line(line))
            case ev.Unknown():
                return replace(self, seq=seq, at=at, unknown_events=self.unknown_events + 1)
            case event:
                known = replace(self, seq=seq, at=at, known_events=self.known_events + 1)
                return _fold(known, event, entry.at)


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
            run = RunState(
                event.run,
                at,
                event.prompts,
                event.options,
                _helpers_of(event, state.runs),
                prompts_file=event.prompts_file,
                again_of=event.again_of,
                will_miss=tuple(event.not_exercised),
            )
            return replace(state, runs=(*state.runs, run)[-KEPT_RESULTS:])
        case ev.RunContinued():
            return replace(state, runs=tuple(_continued(run, event, state.server) for run in state.runs))
        case ev.CodeSeen():
            code = CodeState(event.root, event.commit, event.subject, event.changed)
            return replace(state, server=replace(state.server, code=code))
        case ev.ArmStarted() | ev.ArmProgress() | ev.ArmEnded() | ev.HelperEnded() | ev.TokenTexts():
            return _in_helper(state, event, at)
        case ev.RunEnded():
            return _in_run(state, event)
        case ev.Located():
            located = LocatedState(
                event.locate, event.run, event.helper, event.request, event.result, event.elapsed_s, at
            )
            # What was found is said at once, and again when it is confirmed.
            others = tuple(known for known in state.located if known.number != event.locate)
            return replace(state, located=(*others, located)[-KEPT_RESULTS:])
        case ev.Replayed():
            again = tuple(
                replace(known, replays={**known.replays, event.finding: event.result})
                if known.number == event.locate
                else known
                for known in state.located
            )
            return replace(state, located=again)
        case ev.CensusTaken():
            census = CensusState(event.census, event.result, event.elapsed_s, at)
            return replace(state, censuses=(*state.censuses, census)[-KEPT_RESULTS:])
        case ev.ExperimentsPlanned():
            return replace(state, experiment_plan=event.plan)
        case ev.ExperimentEnded():
            made = ExperimentState(
                event.experiment, event.run, event.helper, event.name, event.result, event.elapsed_s, at
            )
            return replace(state, experiments=(*state.experiments, made)[-KEPT_RESULTS:])
        case ev.RunJudged():
            runs = tuple(
                replace(run, verdict=event.verdict) if run.number == event.run else run for run in state.runs
            )
            return replace(state, runs=runs)
        case ev.ReportWritten():
            return replace(state, reports=(*state.reports, *event.files)[-KEPT_RESULTS:])
        case ev.Asked():
            return replace(state, question=Question(event.what, event.why))
        case ev.Answered():
            return replace(state, question=None)
        case ev.ControlTaken():
            return replace(state, controller=Controller(event.client, event.terminal, event.pid, at))
        case ev.ControlLeft():
            left = state.controller is not None and state.controller.client == event.client
            return replace(state, controller=None) if left else state
        case ev.Trouble():
            line = TroubleLine(at, event.level, event.what, event.why, event.next)
            return replace(state, troubles=(*state.troubles, line)[-KEPT_TROUBLES:])
        case ev.Call():
            call = CallLine(at, event.line, event.outcome, event.elapsed_s)
            return replace(state, calls=(*state.calls, call)[-KEPT_CALLS:])
        case _:
            return state


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
    return replace(state, job=None, last_job=last, question=None, runs=runs, server=server, controller=None)


def _helpers_of(event: ev.RunStarted, runs: Sequence[RunState]) -> tuple[HelperState, ...]:
    """The helpers of a run that begins; those that it does not measure again stand as they were."""
    before = next((run.helpers for run in runs if run.number == event.again_of), ())
    kept = {helper.helper: helper for helper in before if helper.result is not None}
    fresh = {name: HelperState(name) for name in event.helpers}
    return tuple({**kept, **fresh}.values())


def _continued(run: RunState, event: ev.RunContinued, server: ServerState) -> RunState:
    """The run as it goes on: what is repeated is as if it had not begun."""
    if run.number != event.run:
        return run
    helpers = []
    for helper in run.helpers:
        if helper.helper in event.helpers:
            kept = event.kept if helper.helper == event.helpers[0] else []
            arms = tuple(arm for arm in helper.arms if arm.arm in kept)
            helper = HelperState(helper.helper, arms)
        helpers.append(helper)
    return replace(
        run,
        helpers=tuple(helpers),
        verdict=None,
        elapsed_s=None,
        cancelled=False,
        server=server,
        will_miss=tuple(event.not_exercised),
    )


def without_runner(state: SessionState) -> SessionState:
    """The same session, seen after its runner turned out to be dead without having said so."""
    if not state.runner.alive:
        return state
    runner = replace(state.runner, alive=False, ended="it was killed, or its machine went down")
    return replace(_interrupted(state), runner=runner)


def _runner_started(state: SessionState, event: ev.RunnerStarted, at: float) -> SessionState:
    state = _interrupted(state)
    runner = RunnerState(True, event.pid, event.host, event.klbench_version, at, event.target, event.options)
    # The facts hold until a server says other ones: what was measured was measured on such a server.
    known = ServerState(launch_s=state.server.launch_s, facts=state.server.facts)
    return replace(state, runner=runner, server=known)


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
                facts=server.facts,
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
