"""The process that owns a session's server and work.

Invariants: it holds the session's lock; one job at a time; every fact is appended to the event log before
anybody sees it; however a job ends, its end is in the log and what it had is kept; what the log cannot take
any more ends the work; the server ends with the runner. What the jobs do is `Work` (bench.py); this module
knows no sglang.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType

import klbench
from klbench.errors import UndecidedError, UsageError
from klbench.session import commands as cmd
from klbench.session import events as ev
from klbench.session.control import Client, ControlSocket, new_socket_path
from klbench.session.controlling import Controlling
from klbench.session.crash import trouble
from klbench.session.disk import Disk
from klbench.session.folder import SessionFolder
from klbench.session.interruption import interrupted
from klbench.session.log import Entry, EventLog, each_entry
from klbench.session.process_identity import this_host
from klbench.session.request import StartRequest
from klbench.session.state import SessionState, fold
from klbench.session.work import JobView, Session, Work
from klbench.storage import StorageError, refused_by_disk, storage_error

__all__ = ["Job", "JobCancelled", "JobView", "Runner", "Session", "Work"]


class JobCancelled(UndecidedError):
    """The job did not end by itself; what it had is kept."""


class Job:
    """One piece of work in the queue; `error` is what made it fail."""

    def __init__(self, runner: Runner, number: int, kind: str, title: str) -> None:
        self.number = number
        self.kind = kind
        self.title = title
        self.outcome: str | None = None
        self.error: BaseException | None = None
        self.ended = asyncio.Event()
        self.agreed = asyncio.Event()
        self._runner = runner

    def progress(self, phase: str, done: int, total: int, eta_s: float | None = None) -> None:
        self._runner.emit(ev.JobProgress(job=self.number, phase=phase, done=done, total=total, eta_s=eta_s))

    async def ask(self, what: str, why: str, *, agree_with: str = "--yes-flush") -> None:
        if not self._runner.attended:
            raise UsageError(f"it needs your agreement to {what}", why=why, next=f"agree with {agree_with}")
        self.agreed.clear()
        self._runner.emit(ev.Asked(what=what, why=why))
        await self.agreed.wait()
        self._runner.emit(ev.Answered(yes=True))


class Runner:
    """Owns the session while the `async with` block lasts.

    `make_work` gets the runner as its `Session`. `attended`: a user may answer questions. `on_entry` sees
    every entry after it was appended.
    """

    def __init__(
        self,
        folder: SessionFolder,
        start: StartRequest,
        make_work: Callable[[Session], Work],
        *,
        attended: bool,
        on_entry: Callable[[Entry], None] | None = None,
    ) -> None:
        self.folder = folder
        self.start = start
        self.attended = attended
        self.state = SessionState()
        self.stop_reason: str | None = None
        self._on_entry = on_entry
        self._make_work = make_work
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._queue: deque[tuple[Job, Callable[[], Coroutine[None, None, None]]]] = deque()
        self._current: tuple[Job, asyncio.Task[None]] | None = None
        self._jobs = 0
        self._active_at = time.monotonic()
        self._unwritten: StorageError | None = None
        self._disowned = False
        self._exits = contextlib.AsyncExitStack()

    # -- life ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Runner:
        path = new_socket_path()
        async with contextlib.AsyncExitStack() as exits:
            self._lock = exits.enter_context(self.folder.locked(socket=str(path)))
            self.state = fold(each_entry(self.folder.events))
            self._jobs = _jobs_so_far(self.folder.events)
            log = exits.enter_context(EventLog(self.folder.events))
            self._log = log
            log.on_append = self._appended
            self._disk = exits.enter_context(Disk(self.folder, self.start.options.trace_dir))
            self._control = Controlling(self.emit, lambda: self.state.controller)
            self._socket = ControlSocket(path, self._accept, self._control.left)
            await self._socket.open()
            exits.push_async_callback(self._socket.close)
            target, options = self.start.as_shown()
            self.emit(
                ev.RunnerStarted(
                    klbench_version=klbench.__version__,
                    pid=os.getpid(),
                    host=this_host(),
                    target=target,
                    options=options,
                )
            )
            self._work = self._make_work(self)
            worker = asyncio.create_task(self._work_off(), name="klbench-jobs")
            exits.push_async_callback(_cancelled, worker)
            watch = asyncio.create_task(self._watch_disk(), name="klbench-disk")
            exits.push_async_callback(_cancelled, watch)
            if self._unwritten is not None:
                raise self._unwritten
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._end_jobs()
            await self._work.close()
            self._control.close()
            reason = self.stop_reason or ("done" if error is None else f"{type(error).__name__}: {error}")
            self.emit(ev.RunnerEnded(reason=reason))
        finally:
            await self._exits.aclose()
        if error is None and self._unwritten is not None:
            raise self._unwritten

    def emit(self, event: ev.Event) -> Entry:
        """Appends the event; the state has it when this returns.

        Where the disk refuses, nobody sees the event, the work is cancelled and the runner ends: nothing may
        happen that the log cannot hold. It does not raise, for whoever ends something tells of it here.
        """
        if self._disowned:
            return Entry(self.state.seq, time.time(), event)
        try:
            return self._log.append(event)
        except OSError as error:
            if self._unwritten is None:
                self._unwritten = storage_error(error, self.folder.events)
                self._disk.use_reserve()
                self.emit(trouble(self._unwritten, self.folder))
                self.stop(f"{self._unwritten.what}: {self._unwritten.why}")
                if self._current is not None:
                    self._current[1].cancel()
            return Entry(self.state.seq, time.time(), event)

    def _appended(self, entry: Entry) -> None:
        self.state = self.state.apply(entry)
        if self._on_entry is not None:
            self._on_entry(entry)

    # -- what clients ask for -----------------------------------------------------------------------------

    def _accept(self, command: cmd.Command, client: Client) -> None:
        self._active_at = time.monotonic()
        if not isinstance(command, cmd.Ping | cmd.Detach | cmd.Control):
            self._control.check(client)
        match command:
            case cmd.Ping():
                pass
            case cmd.Control():
                self._control.take(client, command)
            case cmd.Detach():
                self._control.left(client)
            case cmd.Cancel():
                self.cancel()
            case cmd.Confirm():
                if self._current is None or self.state.question is None:
                    raise UsageError("the runner asked nothing")
                self._current[0].agreed.set()
            case cmd.Stop():
                self.stop("stopped by the user")
            case _:
                self.submit(command)

    def submit(self, command: cmd.Command) -> Job:
        """Takes up the work that the command names. Raises UsageError when the runner is busy or stopping.

        While the server starts one job may wait for it; otherwise there is one job at a time.
        """
        if self._stopping.is_set():
            raise UsageError("the runner is stopping", why=self.stop_reason or "")
        pending = [self._current[0]] if self._current is not None else []
        pending += [job for job, _ in self._queue]
        if pending and [job.kind for job in pending] != ["launch"]:
            busy = pending[0]
            raise UsageError(
                f"the runner is busy: {busy.title}",
                why="one job at a time, for two would change each other's batches",
                next="wait for it or cancel it",
            )
        work = self._work
        match command:
            case cmd.Run():
                helpers = tuple(command.helpers) or self.start.options.helpers
                title = f"run {', '.join(helpers) or 'all three helpers'}"
                return self._enqueue("run", title, lambda job: work.run(job, helpers))
            case cmd.Continue():
                found = interrupted(self.state)
                if found is None:
                    raise UsageError("no run was interrupted", next="run the helpers")
                title = f"continue run {found.run.number} with {', '.join(found.left)}"
                return self._enqueue("run", title, work.resume)
            case cmd.Locate():
                title = f"locate the origin in {command.helper or 'the first diverged helper'}"
                return self._enqueue(
                    "locate",
                    title,
                    lambda job: work.locate(job, command.helper, command.request, command.relaunch),
                )
            case cmd.Census():
                title = "take the census of the model's operators"
                return self._enqueue("census", title, lambda job: work.census(job, command.relaunch))
            case cmd.Replay():
                return self._enqueue(
                    "replay",
                    "call the located operator again alone",
                    lambda job: work.replay(job, command.locate, command.finding),
                )
            case cmd.Experiment():
                title = f"experiment {', '.join(command.names)}"
                return self._enqueue(
                    "experiment",
                    title,
                    lambda job: work.experiment(
                        job, tuple(command.names), command.helper, command.max_relaunches
                    ),
                )
            case cmd.Report():
                return self._enqueue("report", "write the report", work.report)
            case cmd.Relaunch():
                title = "start the server again" + (" ready to capture" if command.ready_to_capture else "")
                return self._enqueue(
                    "relaunch", title, lambda job: work.relaunch(job, command.ready_to_capture)
                )
            case _:
                raise UsageError(f"the runner cannot do {type(command).__name__}")

    def launch(self) -> Job:
        """Starts the server as a job of its own."""
        title = "attach to the server" if self.start.target.kind == "url" else "start the server"
        return self._enqueue("launch", title, self._work.launch)

    def _enqueue(self, kind: str, title: str, work: Callable[[Job], Coroutine[None, None, None]]) -> Job:
        self._jobs += 1
        job = Job(self, self._jobs, kind, title)
        self._queue.append((job, lambda: work(job)))
        self._changed.set()
        return job

    def cancel(self) -> None:
        """Cancels the job in progress. Raises UsageError when there is none."""
        if self._current is None:
            raise UsageError("nothing is in progress")
        self._current[1].cancel()

    def stop(self, reason: str) -> None:
        """Ends the runner: `serve` returns."""
        self.stop_reason = self.stop_reason or reason
        self._stopping.set()

    async def execute(self, command: cmd.Command) -> None:
        """Does the work and waits for it. Raises what made it fail, JobCancelled when it was cancelled."""
        job = self.submit(command)
        await job.ended.wait()
        if job.error is not None:
            raise job.error

    async def serve(self, *, keep_idle_s: float | None = None) -> None:
        """Works off commands until it is stopped, or until nobody watched it and nothing was to do for
        `keep_idle_s` (by default as the request says): it holds GPUs."""
        keep_idle_s = self.start.options.keep_idle_s if keep_idle_s is None else keep_idle_s
        while not self._stopping.is_set():
            busy = self._current is not None or bool(self._queue) or bool(self._socket.attached)
            if busy:
                self._active_at = time.monotonic()
            left = max(0.1 if busy else 0.0, self._active_at + keep_idle_s - time.monotonic())
            if left <= 0:
                self.stop(f"idle for {keep_idle_s / 60:.0f} minutes with nobody attached")
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), min(left, 5.0))

    # -- jobs ---------------------------------------------------------------------------------------------

    async def _work_off(self) -> None:
        while True:
            while not self._queue:
                self._changed.clear()
                await self._changed.wait()
            job, work = self._queue.popleft()
            try:
                await self._do(job, work)
            finally:
                job.ended.set()
            if self._unwritten is not None:
                self._drop_queue(self._unwritten)
                return

    async def _do(self, job: Job, work: Callable[[], Coroutine[None, None, None]]) -> None:
        began = time.monotonic()
        self._disk.refusal = None
        self.emit(ev.JobStarted(job=job.number, kind=job.kind, title=job.title))
        if self._unwritten is not None:
            job.outcome, job.error = "failed", self._unwritten
            return
        task = asyncio.create_task(work(), name=f"klbench-job-{job.number}")
        self._current = (job, task)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            self._current = None
        self._record_end(job, task, time.monotonic() - began)

    def _record_end(self, job: Job, task: asyncio.Task[None], elapsed_s: float) -> None:
        error = self._unwritten or self._disk.refusal or (None if task.cancelled() else task.exception())
        if isinstance(error, OSError) and refused_by_disk(error):
            error = storage_error(error)
        if error is not None:
            job.outcome, job.error = "failed", error
            if error is not self._unwritten:
                self.emit(trouble(error, self.folder))
        elif task.cancelled():
            job.outcome, job.error = "cancelled", JobCancelled(f"cancelled: {job.title}")
        else:
            job.outcome = "done"
        self.emit(ev.JobEnded(job=job.number, outcome=job.outcome, elapsed_s=elapsed_s))
        if self._unwritten is not None:
            job.outcome, job.error = "failed", self._unwritten
        if job.outcome != "done" and job.kind == "launch":
            self._drop_queue(job.error)

    def _check_lock(self) -> None:
        """Ends the runner, without another word in the log, once the session is another's: a lock that was
        taken for dead and removed, on a disk that several hosts share."""
        there = self.folder.read_lock()
        if there is not None and there != self._lock and not self._disowned:
            self._disowned = True
            self.stop(f"another klbench took the session over ({there.where})")
            if self._current is not None:
                self._current[1].cancel()

    async def _watch_disk(self) -> None:
        """Cancels a job that would fill the disk; the session and its server stay."""
        while True:
            await asyncio.sleep(self._disk.look_every_s)
            self._check_lock()
            if self._current is not None and self._disk.refuses():
                self._current[1].cancel()

    def _drop_queue(self, error: BaseException | None) -> None:
        """What waited for the server cannot be done; it never began."""
        while self._queue:
            job, _ = self._queue.popleft()
            job.outcome, job.error = "failed", error
            job.ended.set()

    async def _end_jobs(self) -> None:
        self._drop_queue(JobCancelled("the runner is stopping"))
        if self._current is not None:
            job, task = self._current
            task.cancel()
            await job.ended.wait()


def _jobs_so_far(events: Path) -> int:
    numbers = (entry.event.job for entry in each_entry(events) if isinstance(entry.event, ev.JobStarted))
    return max(numbers, default=0)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
