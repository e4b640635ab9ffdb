"""The main screen: the server, the three helpers live, the requests, what it means and what to do next.

Narrow windows show helpers, requests and the sentence; tall ones the log too; wide ones the tokens beside.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from textual.containers import Horizontal, VerticalScroll
from textual.widget import Widget

from klbench.core.text import cell_width, visible
from klbench.session import commands as cmd
from klbench.tui import actions, next_step, wording
from klbench.tui.actions import bindings
from klbench.tui.measurement import Measurement
from klbench.tui.messages import Send
from klbench.tui.screens.base import WorkScreen
from klbench.tui.situation import LOADING
from klbench.tui.tables import helper_rows, request_rows
from klbench.tui.verdict_words import mappings
from klbench.tui.widgets.guide_panel import GuidePanel, GuideSize
from klbench.tui.widgets.log_view import LogView
from klbench.tui.widgets.text import Lines, Pane, Sentences, entitle
from klbench.tui.widgets.token_view import NONE_CHOSEN, TokenView
from klbench.tui.widgets.virtual_table import NO_ROWS, VirtualTable

_GUIDE_WIDTH = 38
_GUIDE_BESIDE_FROM = 160
"""Cells of a window from which on requests (60 cells) and tokens (62) have room beside the guide's pane."""


class MainScreen(WorkScreen):
    """See the module. The cursor of the helpers' pane chooses whose requests are shown."""

    place = "main"
    BINDINGS = bindings("main")
    AUTO_FOCUS = "#requests-table"

    _drawn: Measurement | str | None = None
    """What the requests' table shows: a measurement, or why there is none."""
    _drawn_lines: tuple[str, ...] = ()
    _wanted: str | None = None
    """The action that was asked for before the requests were there."""

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        yield Lines(id="status")
        yield Pane(VirtualTable(id="helpers-table"), title="[1] helpers", id="helpers")
        yield Horizontal(
            Pane(VerticalScroll(GuidePanel(id="guide-steps"), can_focus=False), title="guide", id="guide"),
            Pane(VirtualTable(id="requests-table"), title="[2] requests", id="requests"),
            Pane(TokenView(id="token-view"), title="[3] tokens", id="tokens"),
            id="middle",
            classes="row",
        )
        yield Pane(
            LogView(empty="The server has said nothing yet.", id="log-lines"), title="[4] log", id="log"
        )
        yield Sentences(id="sentences")

    @property
    def tells_trouble(self) -> bool:
        return wording.fresh_trouble(self.model.state) is not None

    def draw(self) -> None:
        model, width = self.model, self.size.width
        now = model.now
        self.query_one("#title", Lines).show(wording.title(model.state, model.session_name, width))
        doing = wording.status(model.state, width, live=model.live, mark=model.mark, now=now)
        self.query_one("#status", Lines).show(doing)
        todo = next_step.sentence(model.guide_states())
        said = wording.sentences(
            model.state,
            live=model.live,
            now=now,
            todo=todo,
            located=model.located,
            both=self._says_both,
        )
        self._draw_guide()
        # A window that is not high keeps its lines for the requests.
        self.query_one("#sentences", Sentences).say(
            said[-1:] if self.compact or self.has_class("-low") else said
        )
        self._draw_helpers(now)
        self._draw_requests()
        self._draw_tokens()
        self.query_one(LogView).show(model.log_lines, model.log_revision, model.log_dropped)
        self._draw_log_title()
        if self._wanted is not None:
            self.call_later(self._perform_wanted)

    @property
    def guide_size(self) -> GuideSize | None:
        return None if self._guide_beside or self.has_class("-low") else "compact"

    @property
    def _says_both(self) -> bool:
        """Whether the next step is said beside a known origin: where neither guide nor tour say it below."""
        guided = self.model.guided and self.guide_size is not None
        return not (guided or self.model.touring)

    @property
    def _guide_beside(self) -> bool:
        """Whether requests and tokens keep all their columns beside the guide's pane."""
        return self.size.width >= _GUIDE_BESIDE_FROM

    def do_zoom(self) -> None:
        super().do_zoom()
        self._draw_guide()

    def _draw_guide(self) -> None:
        """The pane of wide windows; narrow ones have the panel above the keys."""
        pane = self.query_one("#guide", Pane)
        pane.display = self._guide_beside and self.model.guided and self._zoomed is None
        if pane.display:
            panel = self.query_one("#guide-steps", GuidePanel)
            panel.show_steps(self.model.guide_states(), _GUIDE_WIDTH - 3, size="full")

    def _draw_helpers(self, now: float) -> None:
        helpers = self.model.helpers
        table = self.query_one("#helpers-table", VirtualTable)
        names = [helper.helper for helper in helpers]
        chosen = names.index(self.model.helper.helper) if self.model.helper.helper in names else 0
        width = self.size.width - 5  # borders, the cursor's mark, a blank before the border
        lines = tuple(wording.helper_line(helper, now, width) for helper in helpers)
        entitle(self.query_one("#helpers", Pane), subtitle=self._where(self.size.width - 6))
        if lines != self._drawn_lines or table.row != chosen:
            self._drawn_lines = lines
            table.show_rows(helper_rows(helpers, wording.helper_heading(width), lines), cursor_key=chosen)

    def _where(self, room: int) -> str:
        """The session's folder, from its end where it is too long."""
        if self.model.folder is None:
            return ""
        path = visible(str(self.model.folder.path))
        home = str(Path.home())
        path = "~" + path.removeprefix(home) if path.startswith(home + "/") else path
        while cell_width(path) > max(room, 1):  # "…" is what is left in a window of a few columns
            path = "…" + path[2:]
        return path

    def _draw_requests(self) -> None:
        measured, helper = self.model.measurement, self.model.helper
        pane, table = self.query_one("#requests", Pane), self.query_one("#requests-table", VirtualTable)
        entitle(pane, f"[2] requests · {helper.helper}")
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
            back, self.model.coming_back_to = self.model.coming_back_to, None
            cursor = back if back is not None else self.model.request if same else first
            table.show_rows(rows, order=order, cursor_key=cursor)
        dirty, sort = int(np.count_nonzero(measured.differing)), table.describe_sort()
        dropped = int(np.count_nonzero(measured.columns.dropped))
        words = [table.describe_filter() or f"{dirty} of {measured.columns.requests} diverged"]
        words += [f"{dropped} dropped"] if dropped else []
        marked = self.model.marked
        words += [f"request {marked.request} of {marked.helper} marked"] if marked is not None else []
        entitle(pane, subtitle=" · ".join([*words, sort or "divergent first"]))

    def _draw_tokens(self) -> None:
        view = self.query_one(TokenView)
        if self.wide:
            view.show(self.model.measurement, self.model.request, self._why_no_tokens())
        request = self.model.request
        pane = self.query_one("#tokens", Pane)
        entitle(pane, f"[3] tokens · request {request}" if request is not None else "[3] tokens", view.place)

    def _draw_log_title(self) -> None:
        view = self.query_one(LogView)
        entitle(
            self.query_one("#log", Pane),
            f"[4] log · {'follow' if view.following else 'stays'}",
            view.place(actions.key_of("last")),
        )

    def _why_no_requests(self) -> str:
        helper, state, run = self.model.helper, self.model.state, next_step.way("r", self.model.situation())
        if wording.launching(state):
            return "\n".join(wording.launch_words(state, self.model.log_lines, self.model.now))
        match helper.status:
            case "waiting" if self.model.run is None and (self.model.live or state.server.phase == "none"):
                return f"Requests appear here as soon as a helper has ended.\nTo run the helpers: {run}."
            case "waiting" if self.model.run is None:
                return f"Nothing was measured.\nTo run the helpers: {run}."
            case "waiting" | "running" if self.model.working:
                return f"{helper.helper} is not done yet.\nIts requests appear here when its arms have ended."
            case "stopped" | "waiting" | "running":
                return f"{helper.helper} was stopped before it ended.\nTo run the helpers again: {run}."
            case "not_run" | "error":
                reason = (helper.result or {}).get("reason") or "the reason was not said"
                return f"{helper.helper} was not compared:\n{reason}"
            case _:
                return "Loading the tokens." if helper.columns else "There are no token columns."

    def _why_no_tokens(self) -> str:
        """What the tokens' pane says as long as there is no request to show."""
        helper = self.model.helper
        if self.model.measurement is not None:
            return NONE_CHOSEN
        if self.model.run is None:
            return "Nothing is measured yet."
        match helper.status:
            case "waiting" | "running" if self.model.working:
                word = "under way" if helper.status == "running" else "not begun"
                return f"{helper.helper} is {word}:\nits tokens appear here when its arms have ended."
            case _:
                return self._why_no_requests()

    def _modulus(self) -> int:
        """The modulus by which the verdict tells the requests apart, else the page size; 0 for none."""
        verdict = (self.model.run.verdict if self.model.run else None) or {}
        for item in mappings(verdict.get("evidence")):
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

    def open_row(self, table: VirtualTable, row: int) -> None:
        if table.id == "helpers-table":
            self.focus_in("#requests")
        elif table.id == "requests-table":
            self.perform("tokens")
        else:
            self.model.offset = row
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

    def go_to_request(self, helper: str, request: int) -> None:
        """Put the cursor on a request, of whatever helper; a filter that hides it is taken away."""
        table = self.query_one("#requests-table", VirtualTable)
        if helper != self.model.helper.helper:
            self.model.chosen_helper, self.model.coming_back_to = helper, request
            self.show_model()
        if not table.move_to_key(request):
            table.filter("")
            table.move_to_key(request)
        self.focus_in("#requests")

    def _to_pane(self, name: str) -> None:
        zoomed = self._zoomed is not None
        if zoomed:
            self.do_zoom()
        self.focus_in(f"#{name}")
        if zoomed:
            self.do_zoom()

    def perform(self, action: str) -> None:
        """What needs the requests while they are read is done as soon as they are there: whoever types ahead
        of the screen means what it is about to show."""
        self._wanted = None
        if actions.BY_ID[action].enabled(self.situation()) == LOADING:
            self._wanted = action
        super().perform(action)

    def _perform_wanted(self) -> None:
        if self._wanted is not None and not self.model.loading:
            self.say("")
            self.perform(self._wanted)

    def do_run(self) -> None:
        self.post_message(Send(cmd.Run()))

    def do_cancel(self) -> None:
        self.post_message(Send(cmd.Cancel()))

    def do_agree(self) -> None:
        self.post_message(Send(cmd.Confirm()))
