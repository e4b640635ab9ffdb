"""The server's log: follows its end, finds errors; and the command log: everything that was run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from textual.widget import Widget

from klbench.core.text import counted
from klbench.tui import wording
from klbench.tui.actions import bindings, key_of
from klbench.tui.screens.base import WorkScreen
from klbench.tui.tables import call_rows
from klbench.tui.widgets.filter_bar import FilterBar
from klbench.tui.widgets.log_view import LogView
from klbench.tui.widgets.text import Lines, Pane, Sentences, entitle
from klbench.tui.widgets.virtual_table import VirtualTable


class LogScreen(WorkScreen):
    """The log in the whole window."""

    place = "log"
    BINDINGS = bindings("log")
    AUTO_FOCUS = "LogView"

    _searched = ""

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        yield Lines(id="status")
        yield Pane(LogView(empty="The server has said nothing yet.", id="log-lines"), title="log", id="log")

    def draw(self) -> None:
        model = self.model
        self.query_one("#title", Lines).show(wording.title(model.state, model.session_name, self.size.width))
        doing = wording.status(model.state, self.size.width, live=model.live, mark=model.mark, now=model.now)
        self.query_one("#status", Lines).show(doing)
        self.query_one(LogView).show(model.log_lines, model.log_revision, model.log_dropped)
        self._entitle()

    def on_log_view_moved(self) -> None:
        self._entitle()

    def do_follow(self) -> None:
        view = self.query_one(LogView)
        view.follow(not view.following)

    def do_search(self) -> None:
        self.query_one(FilterBar).open(self._searched, "text, or re: and a regular expression")

    def on_filter_bar_typed(self, message: FilterBar.Typed) -> None:
        """Mark what holds the text; goes to the first match when it is kept."""
        view, text = self.query_one(LogView), message.text
        try:
            pattern = search_pattern(text)
        except re.error as error:
            self.say(f"no regular expression yet: {error}", "warning")
            return
        self._searched = text
        count = view.search(pattern)
        self.say(f"{count:,} of {view.count:,} {'line' if view.count == 1 else 'lines'}" if text else "")

    def on_filter_bar_kept(self, _message: FilterBar.Kept) -> None:
        self._close_search()
        self._to_match(1)

    def on_filter_bar_given_up(self, _message: FilterBar.GivenUp) -> None:
        self._searched = ""
        self.query_one(LogView).search(None)
        self._close_search()

    def _close_search(self) -> None:
        self.query_one(FilterBar).close()
        self.say("")
        self.query_one(LogView).focus()

    def do_next_match(self) -> None:
        self._to_match(1)

    def do_previous_match(self) -> None:
        self._to_match(-1)

    def _to_match(self, step: int) -> None:
        if not self.query_one(LogView).next_match(step):
            self.say(
                f"no line holds {self._searched!r}"
                if self._searched
                else f"press {key_of('search')} to search first"
            )

    def do_next_error(self) -> None:
        if not self.query_one(LogView).next_error():
            self.say("no line of the log speaks of an error")

    def _entitle(self) -> None:
        view = self.query_one(LogView)
        name = self.model.state.server.log
        entitle(
            self.query_one("#log", Pane),
            f"{name or 'log'} · {'following' if view.following else 'not following'}",
            view.place(key_of("follow")),
        )


def search_pattern(text: str) -> re.Pattern[str] | None:
    """What a search line looks for: the text in any case, or a regular expression behind `re:`."""
    if not text:
        return None
    return re.compile(text[3:] if text.startswith("re:") else re.escape(text), re.IGNORECASE)


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
        table = self.query_one("#calls", VirtualTable)
        words = [table.describe_filter() or counted(len(calls), "line"), table.describe_sort()]
        entitle(self.query_one("#commands", Pane), subtitle=" · ".join(filter(None, words)))
        if total == self._drawn:
            return
        self._drawn = total
        at_end = table.row is None or table.cursor == len(table.order) - 1
        times = [time.strftime("%H:%M:%S", time.localtime(call.at)) for call in calls]
        table.show_rows(call_rows(calls, times))
        if at_end:
            table.move_to(len(calls) - 1)

    @property
    def call(self) -> str:
        """The command under the cursor."""
        calls, row = self.model.state.calls, self.query_one("#calls", VirtualTable).row
        return calls[row].line if row is not None and row < len(calls) else ""

    def on_virtual_table_highlighted(self, message: VirtualTable.Highlighted) -> None:
        calls = self.model.state.calls
        if message.row < len(calls):
            self.query_one("#sentences", Sentences).say([calls[message.row].line], mark=" $ ")
