"""The line that says that the screens stand still, above the footer of every screen while they do."""

from __future__ import annotations

from klbench.core.text import shortened
from klbench.tui.actions import key_of
from klbench.tui.pausing import Held
from klbench.tui.widgets.text import Lines


class PauseLine(Lines):
    """Without height while nothing is held back."""

    DEFAULT_CSS = """
    PauseLine { display: none; height: 1; text-style: bold reverse; }
    PauseLine.held { display: block; }
    """

    def show_held(self, held: Held | None) -> None:
        self.set_class(held is not None, "held")
        words = held.words(key_of("pause")) if held is not None else ""
        self.show(f" {shortened(words, max(self.app.size.width - 2, 20))}" if words else "", layout=False)
