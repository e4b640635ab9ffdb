"""The guide on a screen: docked above the key hints in one line or a few, or a pane with all steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from klbench.core.guide import StepState
from klbench.tui import guide_words
from klbench.tui.widgets.text import Lines

GuideSize = Literal["line", "compact", "full"]


class GuidePanel(Lines):
    """`show_steps` draws the states in as much room as there is."""

    DEFAULT_CSS = "GuidePanel { background: $panel; color: $foreground; height: auto; }"

    def show_steps(self, states: Sequence[StepState], width: int, *, size: GuideSize) -> None:
        """Draw the guide in `width` cells."""
        match size:
            case "line":
                lines = [guide_words.line(states, width)]
            case "compact":
                lines = guide_words.compact(states, width, tall=self.screen.has_class("-tall"))
            case "full":
                lines = guide_words.full(states, max(width, 24))
        self.show("\n".join(lines))
