"""The workbench's application: it owns the model, follows the session, sends commands, opens screens.

Invariants: workers never touch widgets, they post messages; a lost terminal or a signal is a detach, never a
stop; the terminal is restored however this process ends; a crash prints no values of variables and says
where the session is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.command import Provider

from klbench.engine.gpu import choose_for_demo, list_gpus, visible_gpus
from klbench.engine.server_python import find_server_python
from klbench.errors import ExitCode, KlbenchError
from klbench.session import commands as cmd
from klbench.session import link
from klbench.session.folder import SessionFolder
from klbench.session.request import StartRequest, start_from_dict
from klbench.tui import messages
from klbench.tui.follow import SessionFollower
from klbench.tui.measurement import load_measurement
from klbench.tui.model import Model
from klbench.tui.palette import ActionProvider
from klbench.tui.screens.base import WorkScreen
from klbench.tui.screens.dialogs import quit_choice, relaunch_choice
from klbench.tui.screens.help import HelpScreen
from klbench.tui.screens.log import CommandsScreen, LogScreen
from klbench.tui.screens.main import MainScreen
from klbench.tui.screens.origin import OriginScreen
from klbench.tui.screens.start import StartScreen
from klbench.tui.screens.tokens import TokensScreen
from klbench.tui.screens.verdict import VerdictScreen
from klbench.tui.themes import DARK, LIGHT

STOP_WAIT_S = 30.0
"""How long `q` and "stop" waits for the runner to end its server: sglang itself takes up to ten seconds."""


class WorkbenchApp(App[int]):
    """One session at a time; the start screen where there is none yet."""

    TITLE = "klbench"
    CSS_PATH = "workbench.tcss"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {ActionProvider}
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q", "leave", show=False, priority=True)]
    HORIZONTAL_BREAKPOINTS = [(0, "-tiny"), (60, "-narrow"), (140, "-wide")]  # noqa: RUF012 - Textual's type
    VERTICAL_BREAKPOINTS = [(0, "-flat"), (16, "-short"), (32, "-tall")]  # noqa: RUF012

    def __init__(
        self,
        *,
        session: Path | None = None,
        start: StartRequest | None = None,
        readonly: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self.model = Model(readonly=readonly, clock=clock)
        self.crash_file: Path | None = None
        self.crash = ""
        self._session, self._start = session, start
        self._attachment: link.Attachment | None = None

    # Beginning and end

    def on_mount(self) -> None:
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = DARK.name
        self.animation_level = "none"
        self._catch_signals()
        self.set_interval(1.0, self._tick)
        if self._session is not None:
            self._open(self._session)
        elif self._start is not None:
            self.push_screen(MainScreen(self.model))
            self._begin(self._start)
        else:
            self.push_screen(StartScreen(self.model))
            self.run_worker(self._describe_machine(), group="look", exit_on_error=False)
            self.run_worker(self._list_sessions, thread=True, group="look", exit_on_error=False)

    async def on_unmount(self) -> None:
        if self._attachment is not None:
            await self._attachment.close()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                loop.add_signal_handler(number, self._leave_by_signal, number)

    def _leave_by_signal(self, number: int) -> None:
        """The runner goes on: the connection closes with this process, which is all a detach is."""
        self.exit(return_code=128 + number)

    def _handle_exception(self, error: Exception) -> None:
        """A defect of ours: keep the traceback (without values of variables) for `run_workbench`."""
        self._return_code = int(ExitCode.INTERNAL)
        if self._exception is None:
            self._exception = error
            self.crash = "".join(traceback.format_exception(error))
            self._exception_event.set()
        self._close_messages_no_wait()

    def _tick(self) -> None:
        """A time on the screen moves once a second, and only while something is in progress."""
        if self.model.busy and isinstance(self.screen, WorkScreen):
            self.screen.show_model()

    # The session

    def _begin(self, start: StartRequest) -> None:
        async def begin() -> None:
            try:
                folder = await link.start_session(start)
            except KlbenchError as error:
                self.post_message(messages.Failed(error))
            else:
                self.post_message(messages.SessionOpened(folder.path))

        self.run_worker(begin(), group="begin", exit_on_error=False)

    def _open(self, path: Path) -> None:
        """Show the session in `path` and follow it."""
        self.model.folder = SessionFolder(path.absolute())
        if not isinstance(self.screen, MainScreen):
            self.push_screen(MainScreen(self.model))
        follower = SessionFollower(self.model.folder, self.post_message)
        self.run_worker(follower.run(), group="follow", exclusive=True, exit_on_error=False)
        if not self.model.readonly:
            self.run_worker(self._connect(self.model.folder), group="attach", exit_on_error=False)

    async def _connect(self, folder: SessionFolder) -> None:
        """Hold a connection, which tells the runner that somebody watches."""
        with contextlib.suppress(KlbenchError):
            self._attachment = await link.attach(folder)

    async def _send(self, command: cmd.Command) -> None:
        folder = self.model.folder
        if folder is None:
            return
        try:
            if self._attachment is None:
                self._attachment = await link.attach(folder)
            await self._attachment.send(command)
        except KlbenchError as error:
            if error.exit_code == ExitCode.NO_SERVER:
                self._attachment = None
            self.post_message(messages.Failed(error))

    def on_session_changed(self, message: messages.SessionChanged) -> None:
        model = self.model
        had_origin, reports = len(model.state.located), len(model.state.reports)
        first = model.state.seq == 0
        model.state, model.live = message.state, message.live
        if message.log_lines or message.log_restarted:
            model.add_log(message.log_lines, restarted=message.log_restarted)
        self._load_columns()
        if not first and len(model.state.reports) > reports:
            self.notify("written: " + ", ".join(model.state.reports[reports:]), markup=False, timeout=10)
        if not first and len(model.state.located) > had_origin and not isinstance(self.screen, OriginScreen):
            self.notify("an origin was located: press O to see it", markup=False, timeout=10)
        self._show()

    def _load_columns(self) -> None:
        folder = self.model.folder
        for key, run, helper in self.model.wanted() if folder is not None else []:
            assert folder is not None
            self.model.loaded.add(key)

            def load(key: Any = key, run: Any = run, helper: Any = helper, folder: Any = folder) -> None:
                try:
                    measurement = load_measurement(folder, run.number, helper)
                except KlbenchError as error:
                    self.post_message(messages.Failed(error))
                else:
                    self.post_message(messages.Measured(key, measurement))

            self.run_worker(load, thread=True, group="load", exit_on_error=False)

    def on_measured(self, message: messages.Measured) -> None:
        measurement = message.measurement
        known = self.model.measurements.get((measurement.run, measurement.columns.helper))
        if known is None or measurement.texts or not known.texts:
            self.model.measurements[measurement.run, measurement.columns.helper] = measurement
        self._show()

    def _show(self) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, WorkScreen):
                screen.show_model()

    async def _describe_machine(self) -> None:
        self.post_message(messages.MachineKnown(await machine_line()))

    def _list_sessions(self) -> None:
        self.post_message(messages.SessionsListed(link.list_sessions()))

    def on_machine_known(self, message: messages.MachineKnown) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, StartScreen):
                screen.machine = message.line
                screen.show_model()

    def on_sessions_listed(self, message: messages.SessionsListed) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, StartScreen):
                screen.show_sessions(message.summaries)

    # What screens ask for

    def on_send(self, message: messages.Send) -> None:
        self.run_worker(self._send(message.command), group="send", exit_on_error=False)

    def on_start_work(self, message: messages.StartWork) -> None:
        self.push_screen(MainScreen(self.model))
        self._begin(message.start)

    def on_open_session(self, message: messages.OpenSession) -> None:
        self._open(message.path)

    def on_session_opened(self, message: messages.SessionOpened) -> None:
        self._open(message.path)

    def on_failed(self, message: messages.Failed) -> None:
        error = message.error
        text = "\n".join(part for part in (error.why, f"Next: {error.next}" if error.next else "") if part)
        self.notify(text or " ", title=error.what, severity="error", markup=False, timeout=20)

    def on_perform(self, message: messages.Perform) -> None:
        handler: Callable[[], None] = getattr(self, f"do_{message.action}")
        handler()

    def do_tokens(self) -> None:
        self.push_screen(TokensScreen(self.model))

    def do_verdict(self) -> None:
        self._go_to(VerdictScreen)

    def do_log(self) -> None:
        self._go_to(LogScreen)

    def do_commands(self) -> None:
        self._go_to(CommandsScreen)

    def do_origin(self) -> None:
        self.push_screen(OriginScreen(self.model, latest=self.model.located is None))

    def do_report(self) -> None:
        self.post_message(messages.Send(cmd.Report()))

    def do_theme(self) -> None:
        self.theme = LIGHT.name if self.theme == DARK.name else DARK.name

    def do_help(self) -> None:
        if isinstance(self.screen, WorkScreen):
            self.push_screen(HelpScreen(self.screen.place, self.model.situation()))

    def do_locate(self) -> None:
        """Show the origin where it is known; else capture, after a relaunch where that is needed."""
        model = self.model
        if model.located is not None:
            self.push_screen(OriginScreen(model))
            return
        server = model.state.server
        if server.ready_to_capture or model.state.runner.target.get("kind") == "url":
            self._locate(relaunch=False)
            return

        def answered(name: str | None) -> None:
            if name == "relaunch":
                self._locate(relaunch=True)

        self.push_screen(relaunch_choice(server.launch_s), answered)

    def _locate(self, *, relaunch: bool) -> None:
        model = self.model
        order = cmd.Locate(helper=model.helper.helper, request=model.request, relaunch=relaunch)
        self.post_message(messages.Send(order))
        self.push_screen(OriginScreen(model))

    def _go_to(self, kind: type[WorkScreen]) -> None:
        """A screen is on the stack once: going to it again from elsewhere comes back to it."""
        if any(isinstance(screen, kind) for screen in self.screen_stack):
            while not isinstance(self.screen, kind):
                self.pop_screen()
        else:
            self.push_screen(kind(self.model))

    # Leaving

    def action_help_quit(self) -> None:
        self.notify("press q to quit", markup=False, timeout=4)

    def action_leave(self) -> None:
        self.do_quit()

    def do_quit(self) -> None:
        """Ask whether the server stops, where there is one that would go on."""
        model = self.model
        if not model.live or model.readonly:
            self.exit(0)
            return
        job, server = model.state.job, model.state.server
        ours = model.state.runner.target.get("kind") != "url"
        choice = quit_choice(ours=ours, job=job.kind if job else "", launch_s=server.launch_s)
        self.push_screen(choice, self._answered_quit)

    def _answered_quit(self, name: str | None) -> None:
        if name == "leave":
            self.run_worker(self._leave_running(), group="leave", exit_on_error=False)
        elif name == "stop":
            self.notify("stopping", markup=False, timeout=STOP_WAIT_S)
            self.run_worker(self._stop(), group="leave", exit_on_error=False)

    async def _leave_running(self) -> None:
        await self._send(cmd.Detach())
        self.exit(0)

    async def _stop(self) -> None:
        await self._send(cmd.Stop())
        if self.model.folder is not None:
            await _until_gone(self.model.folder)
        self.exit(0)


async def _until_gone(folder: SessionFolder) -> None:
    """Return once the session's runner is gone, or STOP_WAIT_S has passed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_WAIT_S):
            # It is another process: there is no event to wait for.
            while link.find_runner(folder) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def machine_line() -> str:
    """What this machine can do: its GPU or the embedded CPU engine, and the sglang that was found."""
    choice = choose_for_demo(visible_gpus(await list_gpus()))
    where = f"GPU {choice.gpu.index} ({choice.gpu.name})" if choice.gpu else choice.notes[-1]
    try:
        python = await find_server_python()
    except KlbenchError as error:
        return f"{where} · {error.what}: attach to a server, or open a session"
    return f"{where} · sglang {python.sglang_version} ({python.why})"


def run_workbench(*, session: Path | None, start: dict[str, Any] | None, readonly: bool) -> int:
    """Run the workbench in this terminal until the user leaves; returns the exit code.

    `session` is a folder to open; `start` is {"target": ..., "options": ...} to start a new one with.
    Raises KlbenchError where `start` cannot be understood.
    """
    request = start_from_dict(start) if start is not None else None
    app = WorkbenchApp(session=session, start=request, readonly=readonly)
    try:
        app.run()
    except OSError:
        # The terminal is gone: there is nothing to restore and nobody to tell. The runner goes on.
        return int(ExitCode.HUNG_UP)
    with contextlib.suppress(OSError):
        _say_goodbye(app)
    return app.return_code if app.return_code is not None else 0


def _say_goodbye(app: WorkbenchApp) -> None:
    folder = app.model.folder
    if app.crash:
        file = _keep_crash(app.crash, folder)
        print("klbench: the screen failed; this is a defect of klbench, your work goes on.", file=sys.stderr)
        print(f"  details: {file}" if file else app.crash, file=sys.stderr)
    if folder is not None and folder.exists():
        running = link.find_runner(folder) is not None
        state = "still runs" if running else "is kept"
        print(f"The session {state}: klbench open {folder.name}", file=sys.stderr)


def _keep_crash(crash: str, folder: SessionFolder | None) -> Path | None:
    """The traceback in the session's folder, readable by its owner only; None where it cannot be written."""
    if folder is None:
        return None
    file = folder.path / f"crash-workbench-{os.getpid()}.txt"
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as output:
            output.write(crash)
    except OSError:
        return None
    return file
