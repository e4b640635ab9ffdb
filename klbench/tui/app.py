"""The workbench's application: it owns the model, follows the session, sends commands, opens screens.

Invariants: workers never touch widgets, they post messages; a lost terminal or a signal is a detach, never a
stop; the terminal is restored however this process ends; a crash prints no values of variables and says
where the session is.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual.binding import Binding, BindingType
from textual.command import Provider
from textual.filter import Monochrome, NoColor
from textual.notifications import SeverityLevel
from textual.worker import Worker, WorkerState

from klbench import collecting, paths
from klbench.errors import ExitCode, KlbenchError
from klbench.session import crash
from klbench.session.folder import SessionFolder
from klbench.session.request import StartRequest
from klbench.session.state import TroubleLine
from klbench.session.survey import list_sessions
from klbench.settings import Settings, remember, remembered
from klbench.tui import actions, clipboard, messages, themes
from klbench.tui.ascii import AsciiFilter, spelled_out
from klbench.tui.connection import Connection
from klbench.tui.doing import DoingApp
from klbench.tui.follow import SessionFollower
from klbench.tui.keymap import checked
from klbench.tui.look import Look, look_of
from klbench.tui.measurement import Measurement
from klbench.tui.model import Model
from klbench.tui.palette import ActionProvider, PlaceProvider
from klbench.tui.places import Places
from klbench.tui.screens.base import WorkScreen
from klbench.tui.screens.main import MainScreen
from klbench.tui.screens.one_picture import OnePicture
from klbench.tui.screens.overlay import Overlay
from klbench.tui.stylesheet import OneParse
from klbench.tui.widgets.scroll_bars import use_whole_cells

if TYPE_CHECKING:
    from klbench.session.comparing import Side
    from klbench.tui.screens.start import StartScreen

COLOURS = {"standard": 16, "256": 256, "truecolor": 1 << 24, "windows": 16}
"""How many colours Rich's names of colour systems stand for."""


class WorkbenchApp(DoingApp):
    """One session at a time; the start screen where there is none yet."""

    TITLE = "klbench"
    CSS_PATH = "workbench.tcss"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {ActionProvider, PlaceProvider}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "leave", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-tiny"), (60, "-narrow"), (140, "-wide")]  # noqa: RUF012 - Textual's type
    VERTICAL_BREAKPOINTS = [(0, "-flat"), (16, "-low"), (20, "-short"), (32, "-tall")]  # noqa: RUF012

    def __init__(
        self,
        *,
        session: Path | None = None,
        start: StartRequest | None = None,
        readonly: bool = False,
        clock: Callable[[], float] = time.time,
        settings: Settings | None = None,
        advice: str = "",
    ) -> None:
        super().__init__()
        use_whole_cells()
        self.settings = settings
        actions.rebind(checked(settings.bound) if settings is not None else {})
        colours = COLOURS.get(self.console.color_system or "", 2)
        self.look = look_of(settings, colours=colours) if settings is not None else Look()
        for theme in themes.ALL:
            self.register_theme(theme)
        self.theme = self.look.theme_name
        self.stylesheet = OneParse(variables=self.get_css_variables())
        self._advice = advice
        self.model = Model(readonly=readonly, clock=clock)
        self.crash_file: Path | None = None
        self.crash = ""
        self._session, self._start = session, start
        self._start_screen: StartScreen | None = None
        self.connection = Connection(self.model, self.post_message)
        self.places = Places(self.model)

    # Beginning and end

    def on_mount(self) -> None:
        self.set_keymap(actions.rebound())
        self.animation_level = "none"
        if self.no_color:
            # Textual's own answer to it sends shades of grey.
            self._filters[:] = [one for one in self._filters if not isinstance(one, Monochrome)] + [NoColor()]
            self.add_class("-no-color")
        if self.look.ascii:
            self._filters.append(AsciiFilter())
        self.set_class(self.look.slow, "-slow")
        self.set_class(self.look.compact, "-compact")
        self._catch_signals()
        self.set_interval(1.0, self._tick)
        if self._session is not None:
            self._open(self._session)
        elif self._start is not None:
            self.push_screen(MainScreen(self.model))
            self._begin(self._start)
        else:
            from klbench.tui.screens.start import StartScreen

            self._start_screen = StartScreen(self.model, options_set(self.settings))
            self.push_screen(self._start_screen)
            self.run_worker(self._describe_machine(), group="look", exit_on_error=False)
            self.run_worker(self._list_sessions, thread=True, group="look", exit_on_error=False)
        if self._advice:
            self.call_after_refresh(self.say, self._advice)

    async def on_unmount(self) -> None:
        await self.connection.close()

    def exit(self, *arguments: Any, **named: Any) -> None:
        """Leave, from wherever the user is."""
        self.places.keep(self.screen_stack)
        super().exit(*arguments, **named)

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

    def begin_key(self, key: str) -> None:
        if self._work_screen is not None:
            self.say("")
            self.leaving = self.leaving and key == "ctrl+c"
            if isinstance(self.screen, OnePicture) and not self.look.slow:
                self.screen.answer_key()

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,  # noqa: ARG002 - a message stays until the next key
        markup: bool = True,  # noqa: ARG002 - a message is never markup
    ) -> None:
        """Toasts cover what they speak of, so a message gets lines of its own."""
        self.say("\n".join(part for part in (title, message.strip()) if part), severity)

    def say(self, text: str, severity: SeverityLevel = "information") -> None:
        """Tell the user what came of something, on the uppermost screen that shows work and on what lies
        over it."""
        if (screen := self._work_screen) is not None:
            screen.say(text, severity)
            if isinstance(self.screen, Overlay):
                self.screen.say(text, severity)

    @property
    def _work_screen(self) -> WorkScreen | None:
        return next((s for s in reversed(self.screen_stack) if isinstance(s, WorkScreen)), None)

    def _is_at(self, place: str) -> bool:
        return isinstance(self.screen, WorkScreen) and self.screen.place == place

    def _full_paths(self, files: Sequence[str]) -> list[str]:
        folder = self.model.folder
        return [str(folder.path / name) if folder is not None else name for name in files]

    def _tick(self) -> None:
        """A time on the screen moves once a second, and only while something is in progress."""
        collecting.begin()
        self.places.keep(self.screen_stack)
        if self.model.busy and isinstance(self.screen, WorkScreen):
            self.screen.show_model()

    # The session

    def _begin(self, start: StartRequest) -> None:
        self.run_worker(self.connection.begin(start), group="begin", exit_on_error=False)

    def _open(self, path: Path, before: Side | None = None) -> None:
        """Show the session in `path` and follow it."""
        folder = SessionFolder(path.absolute())
        self.model.turn_to(folder, before)
        self.places.turn_to(folder)
        if not isinstance(self.screen, MainScreen):
            self.push_screen(MainScreen(self.model))
        follower = SessionFollower(folder, self.post_message, step_s=self.look.step_s)
        self.run_worker(follower.run(), group="follow", exclusive=True, exit_on_error=False)
        if not self.model.readonly:
            self.run_worker(self.connection.connect(folder), group="attach", exit_on_error=False)

    def on_control_changed(self, _message: messages.ControlChanged) -> None:
        self.show_all()

    def on_session_changed(self, message: messages.SessionChanged) -> None:
        """Show a change, or hold it back while updates are paused."""
        if (held := self.model.held) is None:
            self.take(message)
        else:
            held.take(message)
            if isinstance(self.screen, WorkScreen):
                self.screen.show_held()

    def take(self, message: messages.SessionChanged) -> None:
        model = self.model
        had_origin, reports = len(model.state.located), len(model.state.reports)
        trouble = model.state.troubles[-1:]
        first, last = model.state.seq == 0, model.state.last_job
        model.state, model.live = message.state, message.live
        if (controller := model.state.controller) is not None and self.connection.name is not None:
            model.watching = controller.client != self.connection.name
        if message.log_lines or message.log_restarted:
            model.add_log(message.log_lines, restarted=message.log_restarted)
        self._load_columns()
        if not first and len(model.state.reports) > reports:
            self.say("\n".join(["written:", *self._full_paths(model.state.reports[reports:])]))
        if not first and len(model.state.located) > had_origin and not self._is_at("origin"):
            self.say(f"an origin was located: press {actions.key_of('origin')} to see it")
        if not first and (ended := model.rings_for(last)) is not None:
            self.bell()
            self.say(f"{ended.title}: {ended.outcome}")
        if not first and model.state.troubles[-1:] != trouble:
            self._say_trouble(model.state.troubles[-1])
        self.show_all()

    def _say_trouble(self, line: TroubleLine) -> None:
        """An error is told where the user is, unless that screen shows it in its own lines."""
        screen = self._work_screen
        if line.level == "error" and screen is not None and not screen.tells_trouble:
            self._say_error(line)

    def _load_columns(self) -> None:
        folder = self.model.folder
        for key, run, helper in self.model.wanted() if folder is not None else []:
            assert folder is not None
            self.model.loaded.add(key)
            load = partial(self.connection.load, key, folder, run, helper)
            self.run_worker(load, thread=True, group="load", exit_on_error=False)

    def on_measured(self, message: messages.Measured) -> None:
        measurement = self._readable(message.measurement)
        known = self.model.measurements.get((measurement.run, measurement.columns.helper))
        if known is None or measurement.texts or not known.texts:
            self.model.measurements[measurement.run, measurement.columns.helper] = measurement
        back_to = self.places.arrive(measurement)
        self.show_all()
        if (
            back_to is not None
            and isinstance(self.screen, MainScreen)
            and actions.BY_ID[back_to].enabled(self.model.situation()) is True
        ):
            self.call_after_refresh(self.post_message, messages.Perform(back_to))

    def show_all(self) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, WorkScreen):
                screen.show_model()

    async def _describe_machine(self) -> None:
        self.post_message(messages.MachineKnown(await machine_line()))

    def _list_sessions(self) -> None:
        self.post_message(messages.SessionsListed(list_sessions()))

    def on_machine_known(self, message: messages.MachineKnown) -> None:
        if (screen := self._start_screen) is not None:
            screen.machine = message.line
            screen.show_model()

    def _offer_tour(self) -> None:
        """Once, to somebody who has no session yet; in a real terminal, where settings are known."""
        if self.settings is None or remembered().get("toured") or not self._is_at("start"):
            return
        from klbench.tui.screens.dialogs import tour_choice

        remember("toured", True)

        def answered(name: str | None) -> None:
            if name == "tour":
                self.do_tour()

        self.push_screen(tour_choice(), answered)

    def on_sessions_listed(self, message: messages.SessionsListed) -> None:
        if (screen := self._start_screen) is not None:
            screen.show_sessions(message.summaries)
        if not message.summaries:
            self._offer_tour()

    # What screens ask for

    def on_send(self, message: messages.Send) -> None:
        self.continue_updates()  # whoever commands wants to see what comes of it
        self.run_worker(self.connection.send(message.command), group="send", exit_on_error=False)

    def on_start_work(self, message: messages.StartWork) -> None:
        self.push_screen(MainScreen(self.model))
        self._begin(message.start)

    def on_open_session(self, message: messages.OpenSession) -> None:
        self._open(message.path)

    def on_session_opened(self, message: messages.SessionOpened) -> None:
        while len(self.screen_stack) > 2 and not isinstance(self.screen, MainScreen):
            self.pop_screen()
        self._open(message.path, message.before)
        if message.before is not None:
            load = partial(self.connection.load_before, message.before)
            self.run_worker(load, thread=True, group="load", exit_on_error=False)

    def _readable(self, measurement: Measurement) -> Measurement:
        """Token texts that this terminal can show."""
        if not self.look.ascii:
            return measurement
        texts = {token: spelled_out(text) for token, text in measurement.texts.items()}
        return replace(measurement, texts=texts)

    def on_measured_before(self, message: messages.MeasuredBefore) -> None:
        measurement = self._readable(message.measurement)
        self.model.before_measurements[measurement.columns.helper] = measurement
        self.show_all()

    def on_continued(self, message: messages.Continued) -> None:
        self.model.readonly = False
        self.say(message.what)
        if self.model.folder is not None:
            self.run_worker(self.connection.connect(self.model.folder), group="attach", exit_on_error=False)

    def on_wanted(self, message: messages.Wanted) -> None:
        """Load the columns of an earlier run of this session."""
        folder, wanted = self.model.folder, message.reference
        run = next((run for run in self.model.state.runs if run.number == wanted.run), None)
        helper = run.helper(wanted.helper) if run is not None else None
        if folder is None or run is None or helper is None or helper.columns is None:
            return
        key = (run.number, helper.helper, helper.columns, helper.texts or "")
        if key not in self.model.loaded:
            self.model.loaded.add(key)
            load = partial(self.connection.load, key, folder, run, helper)
            self.run_worker(load, thread=True, group="load", exit_on_error=False)

    def on_copy(self, message: messages.Copy) -> None:
        folder = self.model.folder.path if self.model.folder is not None else paths.make_private(paths.home())

        def copy() -> None:
            said = clipboard.copy(message.text, folder, self._write, clipboard.this_environment())
            self.post_message(messages.Said(said))

        self.run_worker(copy, thread=True, group="copy", exit_on_error=False)

    def copy_to_clipboard(self, text: str) -> None:
        """What is selected with the mouse or in a field goes the way of every copy: Textual's own string
        reaches nobody through tmux."""
        self._clipboard = text
        self.post_message(messages.Copy(text))

    def _write(self, sequence: str) -> None:
        if self._driver is not None:
            self._driver.write(sequence)

    def on_said(self, message: messages.Said) -> None:
        self.say(message.text)

    def on_compared(self, message: messages.Compared) -> None:
        from klbench.tui.screens.before_after import BeforeAfterScreen

        for screen in self.screen_stack:
            if isinstance(screen, BeforeAfterScreen):
                screen.document = message.document
                screen.show_model()

    def on_failed(self, message: messages.Failed) -> None:
        self._say_error(message.error)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        if (error := event.worker.error) is not None and event.state is WorkerState.ERROR:
            self.say_defect(error)

    def say_defect(self, error: BaseException) -> None:
        """Work that failed by a defect of ours is told, and what else is shown stays."""
        with contextlib.suppress(KlbenchError, OSError):
            paths.make_private(paths.home())
        place = self.model.folder.path if self.model.folder is not None else paths.home()
        self._say_error(crash.as_known(error, place))

    def _say_error(self, error: KlbenchError | TroubleLine) -> None:
        parts = (error.what, error.why, f"Next: {error.next}" if error.next else "")
        self.say("\n".join(part for part in parts if part), "error")

    def on_perform(self, message: messages.Perform) -> None:
        handler: Callable[[], None] = getattr(self, f"do_{message.action}")
        handler()


async def machine_line() -> str:
    """What this machine can do: its GPU or the embedded CPU engine, and the sglang that was found."""
    from klbench.engine.gpu import choose_for_demo, list_gpus, visible_gpus
    from klbench.engine.server_python import find_server_python

    choice = choose_for_demo(visible_gpus(await list_gpus()))
    where = f"GPU {choice.gpu.index} ({choice.gpu.name})" if choice.gpu else choice.notes[-1]
    try:
        python = await find_server_python()
    except KlbenchError as error:
        return f"{where} · {error.what}: attach to a server, or open a session"
    return f"{where} · sglang {python.sglang_version} ({python.why})"


def options_set(settings: Settings | None) -> dict[str, Any]:
    """The fields of `Options` that the user has set once, by their names there."""
    names = {"launch_timeout": "launch_timeout_s", "keep_idle": "keep_idle_s"}
    given = settings.run_defaults() if settings is not None else {}
    return {names.get(name, name): value for name, value in given.items()}
