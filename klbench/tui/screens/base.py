"""What all screens share: they draw a model, they get their keys from the registry, they know when a window
is too small.

A screen changes nothing of the model but the selection and never talks to a runner: it posts messages to the
app.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.app import ComposeResult
from textual.widget import Widget

from klbench.tui import actions
from klbench.tui.actions import Situation
from klbench.tui.filtering import FilterError
from klbench.tui.messages import Copy, Perform
from klbench.tui.model import Model
from klbench.tui.screens.one_picture import OnePicture
from klbench.tui.tour import tour_lines
from klbench.tui.widgets.filter_bar import FilterBar
from klbench.tui.widgets.guide_panel import GuidePanel, GuideSize
from klbench.tui.widgets.key_hints import KeyHints
from klbench.tui.widgets.message_line import MessageLine
from klbench.tui.widgets.pause_line import PauseLine
from klbench.tui.widgets.reading import Reading
from klbench.tui.widgets.text import Lines, Pane
from klbench.tui.widgets.virtual_table import VirtualTable

TOO_SMALL = (
    "klbench needs a window of at least 60 × 16.\n"
    "\n"
    "Make it larger, or make its letters smaller.\n"
    "Nothing is lost: the work goes on meanwhile."
)


class WorkScreen(OnePicture[None]):
    """A screen of the workbench. Subclasses set `place` (the registry's name of the screen), compose their
    content in `content` and draw the model in `draw`."""

    place: ClassVar[str] = ""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self._zoomed: Pane | None = None
        self._filtered: VirtualTable | None = None
        """The table whose filter is being typed."""

    def compose(self) -> ComposeResult:
        yield from self.content()
        yield FilterBar(id="filter-bar")
        yield PauseLine()
        yield MessageLine(id="message")
        yield GuidePanel(id="guide-panel")
        yield KeyHints(id="hints")
        yield Lines(TOO_SMALL, id="too-small")

    def content(self) -> Iterable[Widget]:
        raise NotImplementedError

    def draw(self) -> None:
        """Show the model as it is now."""

    def situation(self) -> Situation:
        """What this screen's actions are judged by, now."""
        return self.model.situation()

    @property
    def tells_trouble(self) -> bool:
        """Whether the screen itself shows the latest error of a job."""
        return False

    def show_model(self) -> None:
        """Draw, and bring the footer up to date; nothing before the screen is mounted."""
        if self.is_mounted and self.is_attached and self.query("#hints"):
            self.draw()
            self.show_held()
            self.show_guide()
            self.show_hints()

    def show_held(self) -> None:
        """Say what is held back while updates are paused."""
        if (line := next(iter(self.query(PauseLine)), None)) is not None:
            line.show_held(self.model.held)

    def show_guide(self) -> None:
        """Bring the guide's panel up to date; a window without a session has none."""
        panel, size = self.query_one("#guide-panel", GuidePanel), self.guide_size
        if self.has_class("-tiny") or self.has_class("-flat"):
            panel.display = False  # the window only says that it is too small
            return
        if self.model.touring:
            panel.display = True
            panel.show("\n".join(tour_lines(self.place, self.model, self.size.width)))
            return
        panel.display = size is not None and self.model.guided and self.model.folder is not None
        if self.compact and size is not None:
            size = "line"
        if panel.display and size is not None:
            panel.show_steps(self.model.guide_states(), self.size.width, size=size)

    @property
    def guide_size(self) -> GuideSize | None:
        """How much of the guide this screen shows above its keys."""
        return "line"

    def show_hints(self) -> None:
        situation = self.situation()
        can = [action for action in actions.hints(self.place) if action.enabled(situation) is True]
        if isinstance(self.focused, VirtualTable):
            can += [action for action in actions.hints("table") if self.focused.offers(action.id)]
        self.query_one("#hints", KeyHints).show(can)

    def on_mount(self) -> None:
        self.show_model()

    def on_descendant_focus(self) -> None:
        self.show_hints()

    def on_screen_resume(self) -> None:
        self.show_model()

    def on_resize(self) -> None:
        # Text is composed for a width.
        self.call_after_refresh(self.show_model)

    def say(self, text: str, severity: str = "information") -> None:
        """Show what came of the user's last key, until the next one; "" shows nothing."""
        if self.is_attached and (line := next(iter(self.query(MessageLine)), None)) is not None:
            line.say(text, severity)

    def perform(self, action: str) -> None:
        """Do an action of the registry, or say why it cannot be done now."""
        answer = actions.BY_ID[action].enabled(self.situation())
        if answer is not True:
            paused = "; this is as it was when updates were paused" if self.model.held is not None else ""
            self.say(answer + paused, "warning")
        elif (own := getattr(self, f"do_{action}", None)) is not None:
            own()
        else:
            self.post_message(Perform(action))

    def action_do(self, action: str) -> None:
        self.perform(action)

    @property
    def compact(self) -> bool:
        """Whether rows come before what stands around them."""
        return self.app.has_class("-compact")

    @property
    def wide(self) -> bool:
        return self.has_class("-wide")

    def do_read_on(self) -> None:
        self._read(1)

    def do_read_back(self) -> None:
        self._read(-1)

    def _read(self, step: int) -> None:
        """Scroll the first text that goes on; the one with the focus before others."""
        texts = sorted(self.query(Reading), key=lambda text: not text.has_focus)
        if not any(text.read(step) for text in texts):
            self.say("the text ends here" if step > 0 else "the text begins here")

    def do_back(self) -> None:
        if self._zoomed is not None:
            self.do_zoom()
        else:
            self.dismiss()

    def do_zoom(self) -> None:
        """Give the window to the pane with the focus, or back to all."""
        pane = None
        if self._zoomed is None and self.focused is not None:
            pane = next((node for node in self.focused.ancestors_with_self if isinstance(node, Pane)), None)
        if self._zoomed is not None:
            self._zoomed.remove_class("zoomed")
        self._zoomed = pane
        self.set_class(pane is not None, "has-zoom")
        for row in self.query(".row"):
            row.set_class(pane is not None and pane in row.query(Pane), "has-zoomed")
        if pane is not None:
            pane.add_class("zoomed")

    # The filter line

    def on_virtual_table_filter_wanted(self, message: VirtualTable.FilterWanted) -> None:
        self._filtered = message.table
        hint = " ".join(column.key for column in message.table.rows.columns)
        self.query_one(FilterBar).open(message.table.filter_text, f'kl>1e-3 pos:97 tok:"the", of: {hint}')

    def on_filter_bar_typed(self, message: FilterBar.Typed) -> None:
        """Filter as it is typed; what cannot be read yet leaves the filter as it is, and says why."""
        if self._filtered is None:
            return
        try:
            self._filtered.filter(message.text)
        except FilterError as error:
            self.say(str(error), "warning")
        else:
            self.say(self._filtered.describe_filter())

    def on_filter_bar_kept(self, _message: FilterBar.Kept) -> None:
        self._close_filter()

    def on_filter_bar_given_up(self, _message: FilterBar.GivenUp) -> None:
        if self._filtered is not None:
            self._filtered.filter("")
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one(FilterBar).close()
        self.say("")
        if self._filtered is not None:
            self._filtered.focus()

    def on_virtual_table_rearranged(self, _message: VirtualTable.Rearranged) -> None:
        self.show_model()

    def on_virtual_table_copy_wanted(self, message: VirtualTable.CopyWanted) -> None:
        self.post_message(Copy(message.table.as_text(whole=message.whole)))

    def on_virtual_table_cells_wanted(self, message: VirtualTable.CellsWanted) -> None:
        self.show_cells(message.table, message.row)

    def on_virtual_table_chosen(self, message: VirtualTable.Chosen) -> None:
        self.open_row(message.table, message.row)

    def open_row(self, table: VirtualTable, row: int) -> None:
        """Open what a row leads to; where it leads nowhere, all its cells."""
        self.show_cells(table, row)

    def show_cells(self, table: VirtualTable, row: int) -> None:
        """All cells of a row, to read and to copy."""
        from klbench.tui.screens.cells import CellsScreen, cells_of

        def copy(text: str | None) -> None:
            if text:
                self.post_message(Copy(text))

        self.app.push_screen(CellsScreen(cells_of(table.rows, row)), copy)

    def do_next_field(self) -> None:
        self.focus_next()

    def focus_in(self, selector: str) -> None:
        """Put the focus on the first widget inside `selector` that can have it."""
        for widget in self.query(f"{selector} *"):
            if widget.focusable:
                # At once: later, the pane that is hidden for it would take the focus away with its own.
                self.set_focus(widget)
                return
