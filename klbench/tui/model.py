"""What the screens draw from: the session's state, who answers for it, the loaded columns, the selection.

The app changes it, in the event loop only; screens read it. Selection is kept by helper and request, never
by a place in a table, and follows the first diverged helper until the user chooses one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from klbench.session.folder import SessionFolder
from klbench.session.state import HelperState, LocatedState, RunState, SessionState
from klbench.tui.actions import Situation
from klbench.tui.measurement import Measurement
from klbench.tui.wording import waiting_helpers

KEPT_LOG_LINES = 50_000

MeasurementKey = tuple[int, str, str, str]
"""Run, helper, file of columns, file of texts."""


@dataclass(slots=True)
class Model:
    """Everything that the workbench knows."""

    folder: SessionFolder | None = None
    state: SessionState = field(default_factory=SessionState)
    live: bool = False
    """A runner answers for the session."""
    readonly: bool = False
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

    @property
    def now(self) -> float:
        return self.clock()

    @property
    def session_name(self) -> str:
        return self.folder.name if self.folder is not None else ""

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
        """What was located for the shown helper and request, in this run."""
        number = self.run.number if self.run is not None else None
        return next(
            (
                found
                for found in reversed(self.state.located)
                if found.helper == self.helper.helper
                and found.request == self.request
                and found.run in (None, number)
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
            server=self.state.server.phase,
            job=job.kind if job is not None else "",
            measured=bool(self.run and any(h.result is not None for h in self.run.helpers)),
            request=request if measurement is not None else None,
            request_diverged=diverged,
            located=self.located is not None,
            any_located=bool(self.state.located),
            verdict=self.run is not None and self.run.verdict is not None,
            asks=self.state.question is not None,
        )
