"""What all screens share: they draw a model, they get their keys from the registry, they know when a window
is too small.

A screen changes nothing of the model but the selection and never talks to a runner: it posts messages to the
app.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.app import ComposeResult
from textual.screen import Screen
from textual.widget import Widget

from klbench.tui import actions
from klbench.tui.messages import Perform
from klbench.tui.model import Model
from klbench.tui.widgets.key_hints import KeyHints
from klbench.tui.widgets.text import Lines, Pane

TOO_SMALL = (
    "klbench needs a window of at least 60 × 16.\n"
    "\n"
    "Make it larger, or make its letters smaller.\n"
    "Nothing is lost: the work goes on meanwhile."
)


class WorkScreen(Screen[None]):
    """A screen of the workbench. Subclasses set `place` (the registry's name of the screen), compose their
    content in `content` and draw the model in `draw`."""

    place: ClassVar[str] = ""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self._zoomed: Pane | None = None

    def compose(self) -> ComposeResult:
        yield from self.content()
        yield KeyHints(id="hints")
        yield Lines(TOO_SMALL, id="too-small")

    def content(self) -> Iterable[Widget]:
        raise NotImplementedError

    def draw(self) -> None:
        """Show the model as it is now."""

    def show_model(self) -> None:
        """Draw, and bring the footer up to date; nothing before the screen is mounted."""
        if self.is_mounted and self.is_attached and self.query("#hints"):
            self.draw()
            self.show_hints()

    def show_hints(self) -> None:
        situation = self.model.situation()
        can = [action for action in actions.hints(self.place) if action.enabled(situation) is True]
        self.query_one("#hints", KeyHints).show(can)

    def on_mount(self) -> None:
        self.show_model()

    def on_screen_resume(self) -> None:
        self.show_model()

    def on_resize(self) -> None:
        # Text is composed for a width.
        self.call_after_refresh(self.show_model)

    def perform(self, action: str) -> None:
        """Do an action of the registry, or say why it cannot be done now."""
        answer = actions.BY_ID[action].enabled(self.model.situation())
        if answer is not True:
            self.app.notify(answer, markup=False, timeout=6)
        elif (own := getattr(self, f"do_{action}", None)) is not None:
            own()
        else:
            self.post_message(Perform(action))

    def action_do(self, action: str) -> None:
        self.perform(action)

    @property
    def wide(self) -> bool:
        return self.has_class("-wide")

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

    def do_next_field(self) -> None:
        self.focus_next()

    def focus_in(self, selector: str) -> None:
        """Put the focus on the first widget inside `selector` that can have it."""
        for widget in self.query(f"{selector} *"):
            if widget.focusable:
                widget.focus()
                return
