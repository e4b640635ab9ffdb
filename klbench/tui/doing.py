"""What the app does for an action of the registry: open screens, send commands, ask before what cannot be
undone.

A screen is imported when it is opened: the first frame does not wait for those that nobody looks at.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from textual.notifications import SeverityLevel

from klbench import paths
from klbench.errors import KlbenchError
from klbench.paths import make_private
from klbench.session import commands as cmd
from klbench.session.controlling import described
from klbench.session.folder import write_atomically
from klbench.settings import Settings, remember
from klbench.tui import messages
from klbench.tui.actions import key_of
from klbench.tui.connection import STOP_WAIT_S, Connection
from klbench.tui.look import Look
from klbench.tui.model import Model
from klbench.tui.one_key import OneKey
from klbench.tui.places_to_go import LayerPlace
from klbench.tui.screens.base import WorkScreen
from klbench.tui.situation import can_cancel
from klbench.tui.tour import tour_request

if TYPE_CHECKING:
    from klbench.tui.handing_over import Document


class DoingApp(OneKey):
    """The actions that no screen does itself. What they work on is the workbench's (app.py)."""

    model: Model
    connection: Connection
    settings: Settings | None
    look: Look
    leaving: bool = False
    """ctrl+c was the last key."""

    def say(self, text: str, severity: SeverityLevel = "information") -> None:
        """Tell the user what came of something."""
        raise NotImplementedError

    def show_all(self) -> None:
        """Have every screen draw the model."""
        raise NotImplementedError

    def take(self, message: messages.SessionChanged) -> None:
        """Show what the session has become."""
        raise NotImplementedError

    def on_go_to(self, message: messages.GoTo) -> None:
        """To a request in the requests' table, to a layer or an operator on the origin's screen."""
        from klbench.tui.screens.main import MainScreen

        place = message.place
        if isinstance(place, LayerPlace):
            self._go_to_layer(place)
            return
        while not isinstance(self.screen, MainScreen) and len(self.screen_stack) > 1:
            self.pop_screen()
        if isinstance(self.screen, MainScreen):
            self.screen.go_to_request(place.helper, place.request)

    def _go_to_layer(self, place: LayerPlace) -> None:
        """On the screen of the latest origin, also where that of another request is open."""
        from klbench.tui.screens.origin import OriginScreen

        here, latest = self.screen, self.model.state.latest_located
        if isinstance(here, OriginScreen) and here.located is latest:
            screen = here
        else:
            screen = OriginScreen(self.model, latest=True)
            self.push_screen(screen)
        screen.call_after_refresh(screen.go_to, place.layer, place.module)

    def do_tokens(self) -> None:
        from klbench.tui.screens.tokens import TokensScreen

        self.push_screen(TokensScreen(self.model))

    def do_all_tokens(self) -> None:
        from klbench.tui.screens.all_tokens import AllTokensScreen

        self.push_screen(AllTokensScreen(self.model))

    def do_compare(self) -> None:
        from klbench.tui.screens.compare import CompareScreen

        self.push_screen(CompareScreen(self.model))

    def do_tour(self) -> None:
        """Start the demo with a fault and say at each screen what is to be seen."""
        remember("toured", True)
        self.model.touring = True
        self.post_message(messages.StartWork(tour_request()))

    def do_end_tour(self) -> None:
        self.model.touring = False
        self.say(f"the tour is over: {key_of('help')} lists the keys of every screen")
        self.show_all()

    def do_mark(self) -> None:
        """Mark the request under the cursor; once more takes the mark away."""
        model = self.model
        model.marked = model.here if model.marked != model.here else None
        marked, key = model.marked, key_of("compare")
        self.say(
            f"request {marked.request} of {marked.helper} is marked: {key} on another compares them"
            if marked is not None
            else "no request is marked any more"
        )
        self.show_all()

    def do_continue(self) -> None:
        """Take up the session: through its runner where one lives, else with a new one."""
        if self.model.live:
            self.post_message(messages.Send(cmd.Continue()))
        elif self.model.folder is not None:
            self.say("starting a runner for this session")
            work = self.connection.continue_session(self.model.folder)
            self.run_worker(work, group="begin", exit_on_error=False)

    def do_start_server(self) -> None:
        """The session's server once more: by its runner where one lives, else with a new one."""
        if self.model.live:
            self.post_message(messages.Send(cmd.Relaunch()))
        elif self.model.folder is not None:
            self.say("starting a runner for this session's server")
            work = self.connection.start_server(self.model.folder)
            self.run_worker(work, group="begin", exit_on_error=False)

    def do_ask_cancel(self) -> None:
        """Ask before what is in progress is cancelled."""
        from klbench.tui.screens.dialogs import cancel_choice

        job = self.model.state.job
        if job is not None:
            self.push_screen(cancel_choice(job.title), self._answered_cancel)

    def _answered_cancel(self, name: str | None) -> None:
        if name == "leave":
            self.run_worker(self._leave_running(), group="leave", exit_on_error=False)
        elif name == "cancel" and can_cancel(self.model.situation()) is True:
            self.post_message(messages.Send(cmd.Cancel()))
        elif name == "cancel":
            self.say("it has ended meanwhile: there is nothing to cancel")

    def do_like(self) -> None:
        """The same once more in a new session, to compare; asks what becomes of a server that runs."""

        from klbench.tui.screens.dialogs import repeat_choice

        if not self.model.live:
            self._repeat("keep")
        else:
            self.push_screen(repeat_choice(self.model.state.server.launch_s), self._repeat)

    def _repeat(self, answer: str | None) -> None:
        if answer and self.model.folder is not None:
            self.say("starting the same once more, in a new session")
            self.model.readonly = False
            work = self.connection.repeat(self.model.folder, stop=answer == "stop")
            self.run_worker(work, group="begin", exit_on_error=False)

    def do_before_after(self) -> None:
        from klbench.tui.screens.before_after import BeforeAfterScreen

        before, folder = self.model.before, self.model.folder
        if before is not None and folder is not None:
            self.push_screen(BeforeAfterScreen(self.model))
            work = self.connection.compare(before, folder)
            self.run_worker(work, group="compare", exit_on_error=False)

    def do_distribution(self) -> None:
        from klbench.tui.screens.distribution import DistributionScreen

        self._go_to(DistributionScreen)

    def do_positions(self) -> None:
        from klbench.tui.screens.positions import PositionsScreen

        self._go_to(PositionsScreen)

    def do_residues(self) -> None:
        from klbench.tui.screens.residues import ResiduesScreen

        self._go_to(ResiduesScreen)

    def do_experiments(self) -> None:
        from klbench.tui.screens.experiments import ExperimentsScreen

        self._go_to(ExperimentsScreen)

    def do_census(self) -> None:
        from klbench.tui.screens.census import CensusScreen

        self._go_to(CensusScreen)

    def do_guide(self) -> None:
        if self.model.touring:
            self.say(f"the tour stands in the guide's place: {key_of('end_tour')} ends it")
            return
        self.model.guided = not self.model.guided
        self.show_all()

    def do_guide_all(self) -> None:
        from klbench.tui.screens.guide import GuideScreen

        self._go_to(GuideScreen)

    def do_verdict(self) -> None:
        from klbench.tui.screens.verdict import VerdictScreen

        self._go_to(VerdictScreen)

    def do_log(self) -> None:
        from klbench.tui.screens.log import LogScreen

        self._go_to(LogScreen)

    def do_commands(self) -> None:
        from klbench.tui.screens.log import CommandsScreen

        self._go_to(CommandsScreen)

    def do_origin(self) -> None:
        from klbench.tui.screens.origin import OriginScreen

        self.push_screen(OriginScreen(self.model, latest=self.model.located is None))

    def do_open_in(self) -> None:
        """A text of the session in the user's pager or editor."""
        from klbench.tui import handing_over
        from klbench.tui.screens.dialogs import open_choice

        screen = self.screen
        here = screen.place if isinstance(screen, WorkScreen) else ""
        texts = handing_over.documents(self.model, here, getattr(screen, "call", ""))
        by_name = {document.name: document for document in texts}
        if not texts:
            self.say("There is nothing to open: what the session names lies outside of it.", "warning")
            return

        def answered(answer: str | None) -> None:
            if answer:
                kind, _, name = answer.partition(" ")
                self.run_worker(self._open_in(kind, by_name[name]), group="open in", exit_on_error=False)

        pager, editor = (handing_over.shown_program(kind, os.environ) for kind in ("pager", "editor"))
        titles = tuple((document.name, document.title) for document in texts)
        self.push_screen(open_choice(titles, pager, editor), answered)

    async def _open_in(self, kind: str, document: Document) -> None:
        from klbench.tui import handing_over
        from klbench.tui.ascii import plain

        own = not (self.model.readonly or self.model.readable_only)
        try:
            command = handing_over.program(kind, os.environ)
            with tempfile.TemporaryDirectory(prefix="klbench-") as folder:
                file = document.file
                if not (kind == "editor" and document.name == "report" and own):
                    draw = plain if self.look.ascii else str
                    file = await asyncio.to_thread(handing_over.write_copy, document, Path(folder), draw)
                said = await handing_over.hand_over(self, [*command, str(file)])
        except (KlbenchError, OSError) as error:
            self.post_message(messages.Failed(handing_over.failure(error)))
        else:
            self.post_message(messages.Said(said))

    def do_report(self) -> None:
        self.post_message(messages.Send(cmd.Report()))

    def do_control(self) -> None:
        from klbench.tui.screens.dialogs import control_choice

        if self.model.state.controller is None:
            self.run_worker(self.connection.take_control(), group="send", exit_on_error=False)
            return

        def answered(name: str | None) -> None:
            if name == "take":
                self.run_worker(self.connection.take_control(), group="send", exit_on_error=False)

        self.push_screen(control_choice(described(self.model.state.controller)), answered)

    def do_pause(self) -> None:
        """Hold updates back, or show all that was."""
        if self.model.held is not None:
            self.continue_updates()
            return
        self.model.pause()
        self.show_all()

    def continue_updates(self) -> None:
        """End a pause: what was held back is shown at once. Nothing where there is none."""
        held, self.model.held = self.model.held, None
        if held is None:
            return
        for lines, restarted in held.logs:
            self.model.add_log(lines, restarted=restarted)
        if held.latest is not None:
            self.take(messages.SessionChanged(held.latest.state, held.latest.live, [], False))
        else:
            self.show_all()

    def do_theme(self) -> None:
        other = "light" if self.look.theme == "dark" else "dark"
        self.look = replace(self.look, theme=other)
        self.theme = self.look.theme_name
        remember("theme", other)
        self.say(f"the {other} theme, also from now on{self._set_elsewhere('theme')}")

    def do_compact(self) -> None:
        """More rows and less around them, or as before."""
        compact = not self.look.compact
        self.look = replace(self.look, compact=compact)
        self.set_class(compact, "-compact")
        remember("compact", compact)
        self.show_all()
        kind = "compact: more rows" if compact else "not compact"
        self.say(f"{kind}, also from now on{self._set_elsewhere('compact')}")

    def _set_elsewhere(self, name: str) -> str:
        """What decides it at the next start where that is not what was remembered."""
        origin = self.settings.of(f"workbench.{name}").origin if self.settings is not None else "default"
        return "" if origin in ("default", "remembered") else f", unless {origin} says otherwise"

    def do_picture(self) -> None:
        """The screen as it is, beside what it shows."""
        folder = self.model.folder.path if self.model.folder is not None else paths.home()
        svg = self.export_screenshot(title="klbench")
        try:
            file = make_private(folder / "pictures") / time.strftime("%Y%m%d-%H%M%S.svg")
            write_atomically(file, svg.encode("utf-8"))
        except OSError as error:
            self.say(f"no picture: {error.strerror or error}", "error")
        except KlbenchError as error:
            self.say(f"no picture: {error.what}", "error")
        else:
            self.say(f"written:\n{file}")

    def do_help(self) -> None:
        from klbench.tui.screens.help import HelpScreen

        if isinstance(self.screen, WorkScreen):
            self.push_screen(HelpScreen(self.screen.place, self.screen.situation()))

    def do_locate(self) -> None:
        """Show the origin where it is known; else capture, after a relaunch where that is needed."""

        from klbench.tui.screens.dialogs import relaunch_choice
        from klbench.tui.screens.origin import OriginScreen

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
        from klbench.tui.screens.origin import OriginScreen

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
        """ctrl+c: asks whether to cancel what runs, or says how to leave; pressed again at once, it leaves,
        and what runs goes on."""
        if self.leaving:
            self.exit(0)
            return
        self.leaving = True
        if can_cancel(self.model.situation()) is True and isinstance(self.screen, WorkScreen):
            self.do_ask_cancel()
            return
        self.say(f"press {key_of('quit')} to quit; ctrl+c once more leaves at once, and what runs goes on")

    def action_leave(self) -> None:
        self.do_quit()

    def do_quit(self) -> None:
        """Ask whether the server stops, where there is one that would go on."""

        from klbench.tui.screens.dialogs import quit_choice

        self.continue_updates()
        model = self.model
        if not model.live or model.readonly or model.watching:
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
            self.say(f"stopping the server; this takes up to {STOP_WAIT_S:.0f} s")
            self.run_worker(self._stop(), group="leave", exit_on_error=False)

    async def _leave_running(self) -> None:
        await self.connection.send(cmd.Detach())
        self.exit(0)

    async def _stop(self) -> None:
        await self.connection.stop()
        self.exit(0)
