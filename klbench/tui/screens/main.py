"""The main screen: the server, the three helpers live, the requests, what it means and what to do next.

Narrow windows show helpers, requests and the sentence; tall ones the log too; wide ones the tokens beside.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from textual.containers import Horizontal
from textual.widget import Widget

from klbench.session import commands as cmd
from klbench.tui import wording
from klbench.tui.actions import bindings
from klbench.tui.measurement import Measurement
from klbench.tui.messages import Send
from klbench.tui.screens.base import WorkScreen
from klbench.tui.tables import helper_rows, request_rows
from klbench.tui.widgets.log_view import LogView
from klbench.tui.widgets.text import Lines, Pane, Sentences, entitle
from klbench.tui.widgets.token_view import TokenView
from klbench.tui.widgets.virtual_table import NO_ROWS, VirtualTable


class MainScreen(WorkScreen):
    """See the module. The cursor of the helpers' pane chooses whose requests are shown."""

    place = "main"
    BINDINGS = bindings("main")
    AUTO_FOCUS = "#requests-table"

    _drawn: Measurement | str | None = None
    """What the requests' table shows: a measurement, or why there is none."""
    _drawn_lines: tuple[str, ...] = ()

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        yield Lines(id="status")
        yield Pane(VirtualTable(header=False, id="helpers-table"), title="1 helpers", id="helpers")
        yield Horizontal(
            Pane(VirtualTable(id="requests-table"), title="2 requests", id="requests"),
            Pane(TokenView(id="token-view"), title="3 tokens", id="tokens"),
            id="middle",
            classes="row",
        )
        yield Pane(LogView(empty="The server has said nothing yet.", id="log-lines"), title="4 log", id="log")
        yield Sentences(id="sentences")

    def draw(self) -> None:
        model, width = self.model, self.size.width
        now = model.now
        self.query_one("#title", Lines).show(wording.title(model.state, model.session_name, width))
        doing = wording.status(model.state, width, live=model.live, readonly=model.readonly, now=now)
        self.query_one("#status", Lines).show(doing)
        situation = model.situation()
        request = situation.request if situation.request_diverged else None
        said = wording.sentences(
            model.state, live=model.live, now=now, request=request, located=model.located
        )
        self.query_one("#sentences", Sentences).say(said)
        self._draw_helpers(now)
        self._draw_requests()
        self._draw_tokens()
        self.query_one(LogView).show(model.log_lines, model.log_revision, model.log_dropped)
        self._draw_log_title()

    def _draw_helpers(self, now: float) -> None:
        helpers = self.model.helpers
        table = self.query_one("#helpers-table", VirtualTable)
        names = [helper.helper for helper in helpers]
        chosen = names.index(self.model.helper.helper) if self.model.helper.helper in names else 0
        width = self.size.width - 4  # borders and the cursor's mark
        lines = tuple(wording.helper_line(helper, now, width) for helper in helpers)
        if lines != self._drawn_lines or table.row != chosen:
            self._drawn_lines = lines
            table.show_rows(helper_rows(helpers, lines), cursor_key=chosen)

    def _draw_requests(self) -> None:
        measured, helper = self.model.measurement, self.model.helper
        pane, table = self.query_one("#requests", Pane), self.query_one("#requests-table", VirtualTable)
        entitle(pane, f"2 requests · {helper.helper}")
        if measured is None:
            why = self._why_no_requests()
            if self._drawn != why:
                self._drawn = table.empty = why
                table.show_rows(NO_ROWS)
            entitle(pane, subtitle="")
            return
        if self._drawn is not measured:
            before, self._drawn = self._drawn, measured
            same = isinstance(before, Measurement) and before.columns.helper == helper.helper
            order = measured.divergent_first()
            first = int(order[0]) if len(order) else 0
            rows = request_rows(measured, self._modulus())
            table.show_rows(rows, order=order, cursor_key=self.model.request if same else first)
        dirty, sort = int(np.count_nonzero(measured.differing)), table.describe_sort()
        words = f"{dirty} of {measured.columns.requests} diverged · {sort or 'divergent first'}"
        entitle(pane, subtitle=words)

    def _draw_tokens(self) -> None:
        view = self.query_one(TokenView)
        if self.wide:
            view.show(self.model.measurement, self.model.request)
        request = self.model.request
        pane = self.query_one("#tokens", Pane)
        entitle(pane, f"3 tokens · request {request}" if request is not None else "3 tokens", view.place)

    def _draw_log_title(self) -> None:
        view = self.query_one(LogView)
        entitle(
            self.query_one("#log", Pane),
            f"4 log · {'follow' if view.following else 'stays'}",
            f"line {view.last_shown} of {view.count}" if view.count else "",
        )

    def _why_no_requests(self) -> str:
        helper, state = self.model.helper, self.model.state
        if wording.launching(state):
            return "\n".join(wording.launch_words(state, self.model.log_lines, self.model.now))
        match helper.status:
            case "waiting" if self.model.run is None:
                return "Requests appear here as soon as a helper has ended.\nr runs the three helpers."
            case "waiting" | "running":
                return f"{helper.helper} is not done yet.\nIts requests appear here when its arms have ended."
            case "stopped":
                return f"{helper.helper} was stopped before it ended.\nr runs the three helpers again."
            case "not_run" | "error":
                reason = (helper.result or {}).get("reason") or "the reason was not said"
                return f"{helper.helper} was not compared:\n{reason}"
            case _:
                return "Loading the tokens." if helper.columns else "There are no token columns."

    def _modulus(self) -> int:
        """The modulus by which the verdict tells the requests apart, else the page size; 0 for none."""
        verdict = (self.model.run.verdict if self.model.run else None) or {}
        for item in verdict.get("evidence") or ():
            values = item.get("values") if isinstance(item, dict) else None
            modulus = values.get("modulus") if isinstance(values, dict) else None
            if isinstance(modulus, int) and 1 < modulus <= 1 << 20:
                return modulus
        page = self.model.state.server.facts.get("page_size")
        return page if isinstance(page, int) and page > 1 else 0

    def on_virtual_table_highlighted(self, message: VirtualTable.Highlighted) -> None:
        if message.table.id == "helpers-table" and message.table.has_focus:
            helpers = self.model.helpers
            if message.row < len(helpers) and helpers[message.row].helper != self.model.helper.helper:
                self.model.chosen_helper = helpers[message.row].helper
                self.call_later(self.show_model)
        elif message.table.id == "requests-table":
            self.model.request = message.row
            self.show_model()
        else:
            self._draw_tokens()

    def on_virtual_table_chosen(self, message: VirtualTable.Chosen) -> None:
        if message.table.id == "helpers-table":
            self.focus_in("#requests")
        elif message.table.id == "requests-table":
            self.perform("tokens")

    def on_log_view_moved(self) -> None:
        self._draw_log_title()

    def do_pane_1(self) -> None:
        self._to_pane("helpers")

    def do_pane_2(self) -> None:
        self._to_pane("requests")

    def do_pane_3(self) -> None:
        if self.wide:
            self._to_pane("tokens")
        else:
            self.perform("tokens")

    def do_pane_4(self) -> None:
        if self.query_one("#log").display:
            self._to_pane("log")
        else:
            self.perform("log")

    def _to_pane(self, name: str) -> None:
        zoomed = self._zoomed is not None
        if zoomed:
            self.do_zoom()
        self.focus_in(f"#{name}")
        if zoomed:
            self.do_zoom()

    def do_run(self) -> None:
        self.post_message(Send(cmd.Run()))

    def do_cancel(self) -> None:
        self.post_message(Send(cmd.Cancel()))

    def do_agree(self) -> None:
        self.post_message(Send(cmd.Confirm()))
