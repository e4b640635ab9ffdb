"""The one registry of what a user can do: it feeds key bindings, footer, palette and help.

An action is bound to `do('id')`; the screen (or the app) that shows it has a method `do_<id>`. Whether it can
be done now is asked of the situation, and where it cannot, the reason is what the user gets to read. Actions
of a widget (`table`) are bound to that widget's own action methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from textual.binding import Binding, BindingType

Answer = Literal[True] | str
"""True, or why it cannot be done now."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What actions are judged by; made anew from the session's state and the screen at each question."""

    session: bool = False
    """A session is open."""
    live: bool = False
    """A runner answers, so commands can be sent."""
    readonly: bool = False
    server: str = ""
    """Phase of the server, "ready" when it can work."""
    job: str = ""
    """Kind of the job in progress."""
    measured: bool = False
    """There is a helper's result to look at."""
    request: int | None = None
    """The request under the cursor."""
    request_diverged: bool = False
    located: bool = False
    """The request under the cursor has a located origin."""
    any_located: bool = False
    verdict: bool = False
    asks: bool = False
    """The runner waits for an agreement."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a user can do. `keys` are Textual names; the first is shown. `hint` puts it in the footer."""

    id: str
    keys: tuple[str, ...]
    label: str
    help: str
    screens: tuple[str, ...]
    enabled: Callable[[Situation], Answer] = lambda _situation: True
    hint: int = 0
    """Place in the footer, 0 for none; where the footer is too narrow the highest go first."""

    @property
    def shown_key(self) -> str:
        return shown(self.keys[0])


_SHOWN = {
    "question_mark": "?", "at": "@", "escape": "esc", "up": "↑", "down": "↓", "left": "←", "right": "→",
    "pageup": "pgup", "pagedown": "pgdn",
}  # fmt: skip


def shown(key: str) -> str:
    """A key as a user reads it: `?` for question_mark, `^d` for ctrl+d."""
    return _SHOWN.get(key, key.replace("ctrl+", "^"))


def _ready(situation: Situation) -> Answer:
    """A job can start: a runner answers, its server works, nothing else runs."""
    if situation.readonly:
        return "this session is open read-only"
    if not situation.live:
        return "no runner is attached: this is a finished session"
    if situation.job:
        return f"a {situation.job} is running: wait for it, or press x to cancel it"
    if situation.server != "ready":
        return f"the server is not ready ({situation.server or 'not started'})"
    return True


def _locate(situation: Situation) -> Answer:
    if situation.request is None:
        return "no request is chosen: run the helpers first"
    if not situation.request_diverged:
        return f"request {situation.request} does not differ: nothing to locate"
    return True if situation.located else _ready(situation)


def _report(situation: Situation) -> Answer:
    if not situation.measured:
        return "nothing was measured yet"
    if situation.readonly:
        return "this session is open read-only"
    if not situation.live:
        return "no runner is attached: use `klbench report` on this session"
    return f"a {situation.job} is running" if situation.job else True


def _tokens(situation: Situation) -> Answer:
    return True if situation.request is not None else "no request is chosen: run the helpers first"


def _cancel(situation: Situation) -> Answer:
    if not situation.job:
        return "nothing is running"
    if situation.readonly:
        return "this session is open read-only"
    return True if situation.live else "no runner is attached"


def _session(situation: Situation) -> Answer:
    return True if situation.session else "no session is open yet"


def _confirm(situation: Situation) -> Answer:
    if not situation.asks:
        return "nothing waits for an agreement"
    return "this session is open read-only" if situation.readonly else True


WORK = ("main", "tokens", "origin", "verdict", "log", "commands")
ALL = ("start", *WORK)
SUBSCREENS = ("tokens", "origin", "verdict", "log", "commands")
TABLE = ("table",)
SCROLLING = ("table", "lines")
"""Widgets with action methods of their own: rows with a cursor, lines without."""

ACTIONS: tuple[Action, ...] = (
    Action("tokens", ("enter",), "tokens", "Open the tokens of the request under the cursor.",
           ("main",), _tokens, hint=1),
    Action("back", ("escape",), "back", "Go one level back; nothing is lost.",
           SUBSCREENS, hint=1),
    Action("begin", ("enter",), "start", "Start what this pane shows: the demo, the launch, the attachment, "
           "or open the session.", ("start",), hint=1),
    Action("leave_field", ("escape",), "leave the field", "Out of a text field, so that letters are keys "
           "again.", ("start",), hint=3),
    Action("next_field", ("tab",), "next", "To the next pane or field; shift+tab goes back.",
           ("start", "main"), hint=14),
    Action("next_difference", ("n",), "next difference", "Go to the next token that differs.",
           ("tokens",), hint=2),
    Action("previous_difference", ("N",), "previous difference",
           "Go to the previous token that differs.", ("tokens",), hint=3),
    Action("locate", ("o",), "locate", "Capture the layers of this request and name the first operator that "
           "differs; opens the origin when it is known.", ("main", "tokens", "verdict"), _locate, hint=4),
    Action("origin", ("O",), "origin", "Show the origin that was located last.",
           ("main", "tokens", "verdict"), lambda s: True if s.any_located else "nothing was located yet"),
    Action("agree", ("y",), "agree", "Agree to what the runner asked before it goes on.",
           ("main",), _confirm),
    Action("verdict", ("v",), "verdict", "What the run says, with its evidence and the next steps.",
           ("main", "tokens", "origin"), lambda s: True if s.verdict else "no verdict yet: no run has ended",
           hint=5),
    Action("run", ("r",), "run again", "Run the three helpers again with the same prompts.",
           ("main",), _ready, hint=7),
    Action("cancel", ("x",), "cancel", "Cancel what is running; what it has measured is kept.",
           ("main", "origin"), _cancel, hint=8),
    Action("report", ("e",), "report", "Write the report (Markdown and JSON) into the session's folder.",
           ("main", "tokens", "origin", "verdict"), _report, hint=6),
    Action("log", ("l",), "log", "The server's log.", ("main", "tokens", "origin", "verdict"), _session,
           hint=9),
    Action("commands", ("at",), "commands", "Every call and process of this session, ready to copy.",
           ("main", "tokens", "origin", "verdict", "log"), _session, hint=12),
    Action("follow", ("f",), "follow", "Follow the end of the log, or stay where you are.", ("log",), hint=2),
    Action("next_error", ("e",), "next error", "Go to the next line of the log that speaks of an error.",
           ("log",), hint=3),
    Action("pane_1", ("1",), "pane 1", "Go to the first pane.", ("start", "main")),
    Action("pane_2", ("2",), "pane 2", "Go to the second pane.", ("start", "main")),
    Action("pane_3", ("3",), "pane 3", "Go to the third pane; on the main screen the tokens.",
           ("start", "main")),
    Action("pane_4", ("4",), "pane 4", "Go to the fourth pane; on the main screen the log.",
           ("start", "main")),
    Action("zoom", ("z",), "zoom", "Give the whole window to the pane with the focus, or back.",
           ("main", "tokens", "origin"), hint=11),
    Action("theme", ("T",), "theme", "Change between the dark and the light theme.", ALL),
    Action("help", ("question_mark", "f1"), "help", "All keys of this screen; type to search.", ALL,
           hint=10),
    Action("quit", ("q",), "quit", "Leave; asks whether the server stops or goes on.", ALL, hint=13),
    Action("up", ("up", "k"), "up", "One line up.", SCROLLING),
    Action("down", ("down", "j"), "down", "One line down.", SCROLLING),
    Action("page_up", ("pageup", "ctrl+u"), "page up", "One page up.", SCROLLING),
    Action("page_down", ("pagedown", "ctrl+d"), "page down", "One page down.", SCROLLING),
    Action("first", ("home", "g"), "first", "To the first line.", SCROLLING),
    Action("last", ("end", "G"), "last", "To the last line; a log follows its end again.", SCROLLING),
    Action("scroll_left", ("left",), "left", "Show columns further left.", SCROLLING),
    Action("scroll_right", ("right",), "right", "Show columns further right.", SCROLLING),
    Action("choose", ("enter",), "open", "Open the row under the cursor.", TABLE),
    Action("sort_next", ("s",), "sort", "Sort by the next column.", TABLE),
    Action("sort_reverse", ("S",), "reverse", "Turn the sort order around.", TABLE),
)  # fmt: skip

BY_ID = {action.id: action for action in ACTIONS}


def of_screen(screen: str) -> list[Action]:
    """The actions of a screen, in the order of the registry."""
    return [action for action in ACTIONS if screen in action.screens]


def hints(screen: str) -> list[Action]:
    """Those of its footer, most important first."""
    return sorted((a for a in of_screen(screen) if a.hint), key=lambda action: action.hint)


def bindings(screen: str) -> list[BindingType]:
    """Textual's bindings for a screen, or for a widget (`table`) that has action methods of its own."""
    own = screen in SCROLLING
    return [
        Binding(
            ",".join(action.keys),
            action.id if own else f"do({action.id!r})",
            action.label,
            show=False,
            id=f"{screen}.{action.id}",
            tooltip=action.help,
        )
        for action in of_screen(screen)
    ]
