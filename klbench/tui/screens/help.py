"""Help: every key of the screen it was called from, with what it does and why it cannot be done now; and the
manual, a topic of which appears below the keys when its name is typed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import Input

from klbench import manual
from klbench.core.text import fit, wrap
from klbench.manual.render import render
from klbench.tui import actions
from klbench.tui.actions import Situation
from klbench.tui.screens.overlay import Overlay
from klbench.tui.widgets.field import Field
from klbench.tui.widgets.text import Lines

_ABOUT = {
    "start": "Start: try the demo, launch a model, attach to a server, or come back to a session.",
    "main": "Main: the server, the three helpers, the requests; divergent ones come first. Δ is the decode "
    "logprob minus the prefill logprob of the same token, in nats; kl is the mean of k3 over a request's "
    "tokens; first is the offset of the first difference among the generated tokens.",
    "tokens": "Tokens: one line a generated token, with both logprobs. The strip above shows where they "
    "differ: its bars are the largest difference of the tokens they stand for, a dot is equal bit for bit.",
    "origin": "Origin: the operator whose inputs are identical in both arms and whose output is not, layers "
    "against rows, the operators around it, and the evidence with its grade.",
    "verdict": "Verdict: what the measurement says, for and against, and the next steps.",
    "log": "Log: what the server prints. It follows the end until you move up.",
    "commands": "Commands: every HTTP call and process of this session, to copy and repeat.",
}


class HelpScreen(Overlay[None]):
    """Searchable list of the keys of `place`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1", "close", show=False),
        Binding("down", "scroll(3)", show=False, priority=True),
        Binding("up", "scroll(-3)", show=False, priority=True),
        Binding("pagedown", "scroll(12)", show=False, priority=True),
        Binding("pageup", "scroll(-12)", show=False, priority=True),
    ]
    AUTO_FOCUS = "Input"
    DEFAULT_CSS = """
    HelpScreen > Vertical { width: 96%; max-width: 110; height: 96%; }
    HelpScreen Input:focus { border: none; }
    HelpScreen Input { border: none; height: 1; padding: 0; background: $panel; }
    HelpScreen VerticalScroll { height: 1fr; margin-top: 1; scrollbar-size-vertical: 1; }
    """

    def __init__(self, place: str, situation: Situation) -> None:
        super().__init__()
        self._place, self._situation = place, situation

    def content(self) -> Iterable[Widget]:
        search = Field(placeholder="type to search the keys, or a topic of the manual", select_on_focus=False)
        box = Vertical(search, VerticalScroll(Lines(id="keys"), can_focus=False))
        box.border_title = f"help · {self._place}"
        box.border_subtitle = "esc closes"
        yield box

    def on_mount(self) -> None:
        self._draw("")

    def on_input_changed(self, message: Input.Changed) -> None:
        self._draw(message.value)

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw, self.query_one(Input).value)

    def action_close(self) -> None:
        self.dismiss()

    def action_scroll(self, lines: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)

    @property
    def _width(self) -> int:
        return max(min(self.app.size.width * 96 // 100, 110) - 5, 40)

    def _draw(self, search: str) -> None:
        self.query_one("#keys", Lines).show(
            "\n".join(help_lines(self._place, self._situation, search, self._width))
        )


def help_lines(place: str, situation: Situation, search: str = "", width: int = 100) -> list[str]:
    """Every action of the screen and of the lists on it that `search` finds, grouped, in lines of `width`."""
    found: list[str] = [] if search else [*wrap(_ABOUT.get(place, ""), width), ""]
    lines, table, layers = ("IN THE LOG", "lines"), ("IN TABLES", "table"), ("ON THE MAP", "map")
    inside = {"log": [lines], "origin": [table, layers]}.get(place, [table])
    groups = [("KEYS OF THIS SCREEN", place), *inside]
    for heading, where in groups:
        said = []
        for action in actions.of_screen(where):
            keys = " ".join(actions.shown(key) for key in action.keys)
            answer = action.enabled(situation)
            text = action.help + ("" if answer is True else f" Not now: {answer}.")
            if search.lower() in f"{keys} {action.label} {text}".lower():
                line = f"  {fit(keys, 11)} {fit(action.label, 20)} {text}"
                said += wrap(line, width, indent=" " * 35)
        if said:
            found += [heading, *said, ""]
    found += manual_lines(search, width)
    return found or [f"no key of this screen and no topic of the manual has to do with {search!r}"]


def manual_lines(search: str, width: int) -> list[str]:
    """The topic of the manual that `search` names, and where else it is spoken of; without, the topics."""
    if not search:
        names = " · ".join(topic.name for topic in manual.TOPICS)
        return ["MANUAL", *wrap(f"  type a topic to read it here: {names}", width, indent="  ")]
    named, others = manual.about(search)
    found: list[str] = []
    if named is not None:
        first, *rest = (line.text for line in render(manual.markdown(named), width))
        found += [f"MANUAL: {first}", *rest, ""]
    if others:
        names = " · ".join(topic.name for topic in others)
        found += wrap(f"The manual speaks of it, too: type {names}", width, indent="  ")
    return found
