"""What a runner and its work see of each other: protocols, so that neither knows how the other is made."""

from __future__ import annotations

from typing import Protocol

from klbench.session import events as ev
from klbench.session.folder import SessionFolder
from klbench.session.log import Entry
from klbench.session.request import StartRequest
from klbench.session.state import SessionState


class JobView(Protocol):
    """What a job may do to its own record."""

    @property
    def number(self) -> int: ...

    def progress(self, phase: str, done: int, total: int, eta_s: float | None = None) -> None:
        """Says how far it is."""

    async def ask(self, what: str, why: str, *, agree_with: str = "--yes-flush") -> None:
        """Waits until the user agrees. Raises UsageError where there is no user to ask: `agree_with` is the
        option that agrees beforehand."""


class Work(Protocol):
    """What a runner can do. Each raises KlbenchError, and ends early and keeps what it has when cancelled."""

    async def launch(self, job: JobView) -> None:
        """Starts the server or attaches to it; nothing when it is ready."""

    async def run(self, job: JobView, helpers: tuple[str, ...]) -> None: ...

    async def resume(self, job: JobView) -> None:
        """Continues the latest run where it was interrupted."""

    async def locate(self, job: JobView, helper: str | None, request: int | None, relaunch: bool) -> None: ...

    async def census(self, job: JobView, relaunch: bool) -> None: ...

    async def replay(self, job: JobView, locate: int | None, finding: int) -> None:
        """Calls the operator of a located origin again alone, with other row counts."""

    async def experiment(
        self, job: JobView, names: tuple[str, ...], helper: str | None, max_relaunches: int | None
    ) -> None: ...

    async def relaunch(self, job: JobView, ready_to_capture: bool) -> None: ...

    async def report(self, job: JobView) -> None: ...

    async def close(self) -> None:
        """Ends the server, however it stands. Safe to call again."""


class Session(Protocol):
    """What `Work` sees of its session."""

    @property
    def folder(self) -> SessionFolder: ...

    @property
    def start(self) -> StartRequest: ...

    @property
    def state(self) -> SessionState: ...

    def emit(self, event: ev.Event) -> Entry: ...
