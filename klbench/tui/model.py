"""What the screens draw from: the session's state, who answers for it, the loaded columns, the selection.

The app changes it, in the event loop only; screens read it. Selection is kept by helper and request, never
by a place in a table, and follows the first diverged helper until the user chooses one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from klbench.core.guide import StepState, where_we_are
from klbench.session.bundle import is_unpacked
from klbench.session.folder import SessionFolder
from klbench.session.guided import guide_facts
from klbench.session.interruption import interrupted
from klbench.session.reading import find_runner
from klbench.session.state import HelperState, JobState, LocatedState, RunState, SessionState
from klbench.tui.actions import Situation, key_of
from klbench.tui.measurement import Measurement
from klbench.tui.next_step import reachable
from klbench.tui.pausing import Held
from klbench.tui.wording import waiting_helpers

if TYPE_CHECKING:
    from klbench.session.comparing import Side

KEPT_LOG_LINES = 50_000
RING_FROM_S = 10.0
"""Whoever waits less than this is still looking."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One request of one helper of one run: of this session, or of the one that it repeats (`before`)."""

    run: int
    helper: str
    request: int
    before: bool = False


MeasurementKey = tuple[int, str, str, str]
"""Run, helper, file of columns, file of texts."""


@dataclass(slots=True)
class Model:
    """Everything that the workbench knows."""

    folder: SessionFolder | None = None
    state: SessionState = field(default_factory=SessionState)
    live: bool = False
    """A runner answers for the session."""
    held: Held | None = None
    """What is held back while updates are paused; None while they are not."""
    readonly: bool = False
    watching: bool = False
    """Another terminal has control of the runner, or had it when this one looked."""
    clock: Callable[[], float] = time.time
    measurements: dict[tuple[int, str], Measurement] = field(default_factory=dict)
    """By run and helper."""
    loaded: set[MeasurementKey] = field(default_factory=set)
    log_lines: list[str] = field(default_factory=list)
    log_revision: int = 0
    """Changes whenever the log does; `log_dropped` counts the lines that were let go at its beginning."""
    log_dropped: int = 0
    chosen_helper: str | None = None
    """The helper that the user chose, None while the workbench follows the run."""
    request: int | None = None
    offset: int | None = None
    """The token of it that the tokens' screen is to begin with; None for the first that differs."""
    coming_back_to: int | None = None
    """The request that the requests' table is to begin with."""
    marked: Reference | None = None
    """What the next comparison is with."""
    readable_only: bool = False
    """A bundle, or a session whose runner is on another host."""
    before: Side | None = None
    """The run that this session repeats, and what of it is loaded, by helper."""
    before_measurements: dict[str, Measurement] = field(default_factory=dict)
    guided: bool = True
    """The guide's panel is shown."""
    skipped: set[str] = field(default_factory=set)
    """Steps of the guide that the user passed over."""
    touring: bool = False
    """The guided tour of the first start is under way."""

    def turn_to(self, folder: SessionFolder, before: Side | None = None) -> None:
        """Show another session: nothing of the one before stays, but what the new one repeats."""
        self.folder, self.state, self.live, self.watching = folder, SessionState(), False, False
        lock = find_runner(folder)
        self.readable_only = is_unpacked(folder) or (lock is not None and not lock.local)
        self.before, self.before_measurements = before, {}
        for known in (self.measurements, self.loaded, self.log_lines):
            known.clear()
        self.log_revision, self.log_dropped = self.log_revision + 1, 0
        self.chosen_helper, self.request, self.marked, self.held = None, None, None, None
        self.skipped.clear()

    def rings_for(self, before: JobState | None) -> JobState | None:
        """The job that ended since `before` did, where the user wants to be called back to it."""
        ended = self.state.last_job
        if ended is None or not self.state.runner.options.get("notify"):
            return None
        known = before is not None and before.number == ended.number
        return None if known or (ended.elapsed_s or 0.0) < RING_FROM_S else ended

    @property
    def here(self) -> Reference | None:
        """The request under the cursor."""
        if self.run is None or self.request is None:
            return None
        return Reference(self.run.number, self.helper.helper, self.request)

    def find(self, wanted: Reference) -> Measurement | None:
        """The measurement that a reference names, once it is loaded."""
        if wanted.before:
            return self.before_measurements.get(wanted.helper)
        return self.measurements.get((wanted.run, wanted.helper))

    @property
    def now(self) -> float:
        """The time that the screens show, which stands still with them."""
        return self.clock() if self.held is None else self.held.at

    def pause(self) -> None:
        """Hold back what comes from now on."""
        self.held = Held(self.clock(), self.state, self.live, KEPT_LOG_LINES)

    @property
    def session_name(self) -> str:
        return self.folder.name if self.folder is not None else ""

    @property
    def mark(self) -> str:
        """Why nothing can be commanded from this terminal, for the status line; empty where it can be."""
        if self.readonly:
            return "read-only"
        if not (self.watching and self.live):
            return ""
        controller = self.state.controller
        if controller is None:
            return f"WATCHING: nobody has control, {key_of('control')} takes it"
        who = controller.terminal or f"pid {controller.pid}"
        return f"WATCHING: {who} has control, {key_of('control')} takes it over"

    @property
    def run(self) -> RunState | None:
        return self.state.run

    @property
    def helpers(self) -> tuple[HelperState, ...]:
        """The helpers of the latest run, or the three that wait before the first."""
        return self.run.helpers if self.run is not None else waiting_helpers()

    @property
    def helper(self) -> HelperState:
        """The helper whose requests are shown: the chosen one, else the first diverged, else the first with a
        result, else the first."""
        helpers = self.helpers
        chosen = next((h for h in helpers if h.helper == self.chosen_helper), None)
        if chosen is not None:
            return chosen
        diverged = next((h for h in helpers if h.status == "diverged"), None)
        ended = next((h for h in reversed(helpers) if h.columns is not None), None)
        return diverged or ended or (helpers[0] if helpers else HelperState("match"))

    @property
    def measurement(self) -> Measurement | None:
        """The columns of the shown helper, once they are loaded."""
        return self.measurements.get((self.run.number, self.helper.helper)) if self.run is not None else None

    @property
    def located(self) -> LocatedState | None:
        """What was located for the shown helper and request, in this run or one that it measures again."""
        return next(
            (
                found
                for found in reversed(self.state.located_of(self.run))
                if found.helper == self.helper.helper and found.request == self.request
            ),
            None,
        )

    @property
    def busy(self) -> bool:
        """Whether a time on the screen runs: then, and only then, it is drawn again every second."""
        server = self.state.server.phase
        return self.live and (
            self.state.job is not None or server not in ("none", "ready", "stopped", "failed")
        )

    @property
    def working(self) -> bool:
        """Whether the job of the log is under way: a runner that died has none, one of another host may."""
        return self.state.job is not None and (self.live or self.readable_only)

    @property
    def loading(self) -> bool:
        """Whether a request will be under the cursor in a moment: its columns are read, or laid out."""
        if self.folder is not None and self.state.seq == 0:
            return True
        measured = self.measurement
        if measured is None:
            return self.run is not None and self.helper.columns is not None
        return self.request is None and measured.columns.requests > 0

    def wanted(self) -> list[tuple[MeasurementKey, RunState, HelperState]]:
        """Columns of the latest run that have a file and are not loaded (or were loaded without texts)."""
        run = self.run
        if run is None:
            return []
        keys = [((run.number, h.helper, h.columns, h.texts or ""), run, h) for h in run.helpers if h.columns]
        return [item for item in keys if item[0] not in self.loaded]

    def add_log(self, lines: list[str], *, restarted: bool) -> None:
        """Append lines of the server's log; a bounded number is kept."""
        if restarted:
            self.log_lines.append("── the log begins anew ──")
        self.log_lines.extend(lines)
        if (extra := len(self.log_lines) - KEPT_LOG_LINES) > 0:
            del self.log_lines[:extra]
            self.log_dropped += extra
        self.log_revision += 1

    def guide_states(self) -> tuple[StepState, ...]:
        """The steps of the guided path as they stand, with the way to each from here."""
        facts = guide_facts(self.state, skipped=self.skipped)
        if not self.working:
            facts = replace(facts, doing="")
        states = where_we_are(facts)
        return reachable(states, self.situation())

    def situation(self) -> Situation:
        """What actions are judged by, now."""
        measurement, request = self.measurement, self.request
        diverged = (
            measurement is not None
            and request is not None
            and request < len(measurement.differing)
            and bool(measurement.differing[request])
        )
        job = self.state.job
        return Situation(
            session=self.folder is not None,
            live=self.live,
            readonly=self.readonly,
            watching=self.watching,
            controlled=self.state.controller is not None,
            server=self.state.server.phase,
            job=job.kind if job is not None else "",
            measured=bool(self.run and any(h.result is not None for h in self.run.helpers)),
            loading=self.loading,
            request=request if measurement is not None else None,
            request_diverged=diverged,
            located=self.located is not None,
            any_located=bool(self.state.located),
            verdict=self.run is not None and (self.run.verdict is not None or bool(self.run.will_miss)),
            texts=bool(self.state.server.log or self.state.calls or self.state.reports),
            asks=self.state.question is not None,
            name=self.session_name or "SESSION",
            interrupted=self.run is not None and interrupted(self.state) is not None,
            readable_only=self.readable_only,
            before=self.before is not None,
            touring=self.touring,
            paused=self.held is not None,
            attached=self.state.runner.target.get("kind") == "url",
        )
