"""The server's log: follows its end, finds errors; and the command log: everything that was run."""

from __future__ import annotations

import time
from collections.abc import Iterable

from textual.widget import Widget

from klbench.tui import wording
from klbench.tui.actions import bindings
from klbench.tui.screens.base import WorkScreen
from klbench.tui.tables import call_rows
from klbench.tui.widgets.log_view import LogView
from klbench.tui.widgets.text import Lines, Pane, Sentences, entitle
from klbench.tui.widgets.virtual_table import VirtualTable


class LogScreen(WorkScreen):
    """The log in the whole window."""

    place = "log"
    BINDINGS = bindings("log")
    AUTO_FOCUS = "LogView"

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        yield Lines(id="status")
        yield Pane(LogView(empty="The server has said nothing yet.", id="log-lines"), title="log", id="log")

    def draw(self) -> None:
        model = self.model
        self.query_one("#title", Lines).show(wording.title(model.state, model.session_name, self.size.width))
        doing = wording.status(
            model.state, self.size.width, live=model.live, readonly=model.readonly, now=model.now
        )
        self.query_one("#status", Lines).show(doing)
        self.query_one(LogView).show(model.log_lines, model.log_revision, model.log_dropped)
        self._entitle()

    def on_log_view_moved(self) -> None:
        self._entitle()

    def do_follow(self) -> None:
        view = self.query_one(LogView)
        view.follow(not view.following)

    def do_next_error(self) -> None:
        if not self.query_one(LogView).next_error():
            self.app.notify("no line of the log speaks of an error", markup=False, timeout=3)

    def _entitle(self) -> None:
        view = self.query_one(LogView)
        name = self.model.state.server.log
        entitle(
            self.query_one("#log", Pane),
            f"{name or 'log'} · {'following' if view.following else 'not following'}",
            f"line {view.last_shown} of {view.count}" if view.count else "",
        )


class CommandsScreen(WorkScreen):
    """Every HTTP call and process of the runner, the newest last; the chosen one whole below."""

    place = "commands"
    BINDINGS = bindings("commands")
    AUTO_FOCUS = "#calls"

    _drawn = -1

    def content(self) -> Iterable[Widget]:
        empty = (
            "Calls and processes of this session appear here,\neach a line that can be copied and repeated."
        )
        yield Lines(" klbench · what was run in this session", id="title")
        yield Pane(VirtualTable(empty=empty, id="calls"), title="commands", id="commands")
        yield Sentences(id="sentences")

    def draw(self) -> None:
        calls = self.model.state.calls
        total = self.model.state.seq
        if total == self._drawn:
            return
        self._drawn = total
        table = self.query_one("#calls", VirtualTable)
        at_end = table.row is None or table.cursor == len(table.order) - 1
        times = [time.strftime("%H:%M:%S", time.localtime(call.at)) for call in calls]
        table.show_rows(call_rows(calls, times))
        if at_end:
            table.move_to(len(calls) - 1)
        entitle(self.query_one("#commands", Pane), subtitle=f"{len(calls)} lines")

    def on_virtual_table_highlighted(self, message: VirtualTable.Highlighted) -> None:
        calls = self.model.state.calls
        if message.row < len(calls):
            self.query_one("#sentences", Sentences).say([calls[message.row].line], mark=" $ ")
