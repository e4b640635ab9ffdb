"""The one registry of what a user can do: it feeds key bindings, footer, palette and help.

An action is bound to `do('id')`; the screen (or the app) that shows it has a method `do_<id>`. Whether it can
be done now is asked of the situation, and where it cannot, the reason is what the user gets to read. Actions
of a widget (`table`) are bound to that widget's own action methods.
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from klbench.tui.situation import (
    Answer,
    Situation,
    can_analyse,
    can_before_after,
    can_cancel,
    can_confirm,
    can_continue,
    can_control,
    can_like,
    can_locate,
    can_next_finding,
    can_open_in,
    can_origin,
    can_pause,
    can_ready,
    can_replay,
    can_report,
    can_session,
    can_start_server,
    can_tokens,
)

if TYPE_CHECKING:
    from textual.binding import BindingType


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a user can do. `keys` are Textual names; the first is shown. `hint` puts it in the footer."""

    id: str
    default_keys: tuple[str, ...]
    label: str
    help: str
    screens: tuple[str, ...]
    enabled: Callable[[Situation], Answer] = lambda _situation: True
    hint: int = 0
    """Place in the footer, 0 for none; where the footer is too narrow the highest go first."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Those that do it: its own, or what the configuration says."""
        return _REBOUND.get(self.id, self.default_keys)

    @property
    def shown_key(self) -> str:
        return shown(self.keys[0])


_REBOUND: dict[str, tuple[str, ...]] = {}
"""Keys of the configuration, by the id of the action."""


_RENAMED = {
    "solidus": "slash", "reverse_solidus": "backslash", "commercial_at": "at", "hyphen_minus": "minus",
    "plus_sign": "plus", "low_line": "underscore",
}  # fmt: skip
"""Textual's names of characters where they are not Unicode's."""


def name_of_character(character: str) -> str:
    """Textual's name of a key that types a character: `?` is question_mark, letters are themselves."""
    if character.isalnum():
        return character
    name = unicodedata.name(character).lower().replace("-", "_").replace(" ", "_")
    return _RENAMED.get(name, name)


_SHOWN = {name_of_character(character): character for character in string.punctuation} | {
    "escape": "esc", "up": "↑", "down": "↓", "left": "←", "right": "→", "pageup": "pgup", "pagedown": "pgdn",
}  # fmt: skip


def shown(key: str) -> str:
    """A key as a user reads it: `?` for question_mark, `^d` for ctrl+d."""
    return _SHOWN.get(key, key.replace("ctrl+", "^"))


ANALYSIS = ("distribution", "positions", "residues", "experiments")
"""What a run's numbers say, one screen a question."""
WORK = (
    "main",
    "tokens",
    "all_tokens",
    "compare",
    "before_after",
    "origin",
    "verdict",
    *ANALYSIS,
    "census",
    "numbers",
    "guide",
    "log",
    "commands",
)
ALL = ("start", *WORK)
SUBSCREENS = tuple(screen for screen in WORK if screen != "main")
RESULTS = ("main", "tokens", "origin", "verdict", *ANALYSIS, "census")
"""Screens that show results: from each of them all others are one key away."""


def _others(place: str) -> tuple[str, ...]:
    """From where that one is a key away."""
    return tuple(screen for screen in RESULTS if screen != place)


GUIDED = tuple(screen for screen in WORK if screen != "guide")
"""Screens with the guide's panel."""
READING = ("origin", "verdict", "experiments", "guide", "before_after")
"""Screens with a text that may be longer than its place."""
DIFFERENCES = ("tokens", "all_tokens", "compare")
TABLE = ("table",)
SCROLLING = ("table", "lines")
WIDGETS = (*SCROLLING, "map")
"""Widgets with action methods of their own: rows with a cursor, lines without, a map with one."""

ACTIONS: tuple[Action, ...] = (
    Action("tokens", ("enter",), "tokens", "Open the tokens of the request under the cursor.",
           ("main",), can_tokens, hint=1),
    Action("back", ("escape",), "back", "Go one level back; nothing is lost.",
           SUBSCREENS, hint=1),
    Action("begin", ("enter",), "start", "Start what this pane shows: the demo, the launch, the attachment, "
           "or open the session.", ("start",), hint=1),
    Action("tour", ("t",), "tour", "A tour of two minutes: the demo with a planted fault, to the operator "
           "where the difference is born.", ("start",), hint=2),
    Action("leave_field", ("escape",), "leave the field", "Out of a text field, so that letters are keys "
           "again.", ("start",), hint=3),
    Action("next_field", ("tab",), "next", "To the next pane or field; shift+tab goes back.",
           ("start", "main", "origin"), hint=14),
    Action("next_difference", ("n",), "next difference", "Go to the next token that differs.",
           DIFFERENCES, hint=2),
    Action("previous_difference", ("N",), "previous difference",
           "Go to the previous token that differs.", DIFFERENCES),
    Action("locate", ("o",), "locate", "Capture the layers of this request and name the first operator that "
           "differs; opens the origin when it is known.", ("main", "tokens", "verdict"), can_locate, hint=4),
    Action("origin", ("O",), "origin", "Show the origin that was located last.",
           ("main", "tokens", "verdict", *ANALYSIS), can_origin),
    Action("all_tokens", ("t",), "all tokens", "The tokens of all requests and helpers of this run in one "
           "table, to sort and filter.", ("main",), can_tokens, hint=15),
    Action("mark", ("space",), "mark", "Mark this request, to compare another with it; once more takes the "
           "mark away.", ("main", "tokens"), can_tokens),
    Action("compare", ("c",), "compare", "This request beside the marked one, or beside itself in another "
           "helper.", ("main", "tokens"), can_tokens, hint=15),
    Action("open_token", ("enter",), "its request", "Open the request of the token under the cursor, at that "
           "token.", ("all_tokens",), hint=2),
    Action("set_beside", ("enter",), "side by side", "Set the first request that changed beside what it was.",
           ("before_after",), hint=2),
    Action("other_helper", ("h",), "other helper", "Compare with the next helper of that run.",
           ("compare",), hint=3),
    Action("other_run", ("R",), "other run", "Compare with the next run of this session, or of the one it "
           "repeats.", ("compare",), hint=5),
    Action("previous_request", ("left_square_bracket",), "previous request",
           "Compare with the request before.", ("compare",)),
    Action("next_request", ("right_square_bracket",), "next request", "Compare with the request behind.",
           ("compare",), hint=4),
    Action("continue", ("u",), "continue", "Take up what was interrupted: the server is started again, and "
           "nothing that was measured is measured again.", ("main",), can_continue, hint=6),
    Action("start_server", ("U",), "start server", "Start this session's server again and measure nothing: "
           "then run, locate, replay and experiments work on it.", ("main",), can_start_server, hint=16),
    Action("like", ("L",), "once more, compare", "After an edit of the server's code: the same command, "
           "prompts and helpers in a new session, before and after side by side.", ("main",), can_like),
    Action("before_after", ("B",), "before and after", "What changed since the session that this repeats.",
           ("main",), can_before_after),
    Action("agree", ("a",), "agree", "Agree to what the runner asked before it goes on.",
           ("main", "origin", "experiments"), can_confirm, hint=2),
    Action("verdict", ("v",), "verdict", "What the run says, with its evidence and the next steps.",
           _others("verdict"),
           lambda s: True if s.verdict else "no verdict yet: no run has ended", hint=5),
    Action("decide", ("n",), "decide it", "Make the one experiment that decides the explanation under the "
           "cursor.", ("verdict",), can_ready, hint=2),
    Action("distribution", ("d",), "distribution", "How large the differences are: histogram, tail and the "
           "largest ones.", _others("distribution"), can_analyse, hint=10),
    Action("positions", ("b",), "by position", "Where the differences lie: by position, by offset, behind "
           "the cached prefix.", _others("positions"), can_analyse, hint=10),
    Action("column_left", ("left",), "column left", "To the column on the left; below each chart stands what "
           "is in the column.", ("positions",), can_analyse),
    Action("column_right", ("right",), "column right", "To the column on the right.", ("positions",),
           can_analyse),
    Action("residues", ("m",), "residues", "Divergent requests by residue of their lengths, the striking one "
           "marked.", _others("residues"), can_analyse, hint=10),
    Action("experiments", ("X",), "experiments", "The experiments as a matrix: made, possible, with cost and "
           "meaning.", _others("experiments"), can_session, hint=8),
    Action("census", ("M",), "census", "Which operators change a row's bits with the number of rows: "
           "operators x M.", _others("census"), can_session, hint=10),
    Action("take_census", ("r",), "take it", "Call every stateless operator again on the live server with 1, "
           "2, 3 and powers of two of its rows.", ("census",), can_ready, hint=2),
    Action("next_helper", ("h",), "next helper", "Show the next helper that was compared.", ANALYSIS[:3],
           can_analyse, hint=2),
    Action("pad", ("p",), "pad to it", "Predict, pad all prompts to the residue under the cursor, and see.",
           ("residues",), can_ready, hint=3),
    Action("make", ("enter",), "make it", "Make the experiment under the cursor.", ("experiments",),
           can_ready, hint=2),
    Action("mark_experiment", ("space",), "mark", "Mark the experiment under the cursor for a plan, or take "
           "the mark away.", ("experiments",), hint=3),
    Action("make_plan", ("P",), "make marked", "Make all marked experiments; each configuration of the "
           "server is started once.", ("experiments",), can_ready, hint=4),
    Action("numbers", ("f",), "numbers", "The real rows of both arms at the origin, element by element.",
           ("origin",), can_origin, hint=2),
    Action("replay", ("r",), "replay", "Call the operator again alone on the live server with 1, 2, 3, ... "
           "rows: the M table.", ("origin",), can_replay, hint=3),
    Action("export", ("E",), "export", "Write the origin as a folder: its tensors, and a script that shows "
           "the difference without klbench and without a server.", ("origin",), can_origin, hint=4),
    Action("next_finding", ("n",), "next finding", "Go to the next finding of this capture.", ("origin",),
           can_next_finding, hint=5),
    Action("next_argument", ("n",), "next argument", "Go to the next argument of the operator: what it was "
           "given, what it returned.", ("numbers",), hint=2),
    Action("previous_argument", ("N",), "previous argument", "Go to the argument before.", ("numbers",)),
    Action("guide", ("w",), "guide", "Show or hide the guide: the current step, why it matters, what was "
           "learned, what is next.", GUIDED, can_session, hint=21),
    Action("guide_all", ("W",), "all steps", "The guided path in full, with the words that it uses.",
           GUIDED, can_session, hint=22),
    Action("do_step", ("enter",), "do it", "Do the step under the cursor.", ("guide",), hint=2),
    Action("skip", ("space",), "pass over", "Pass the step under the cursor over, or take it up again.",
           ("guide",), hint=3),
    Action("run", ("r",), "run again", "Run the three helpers again with the same prompts.",
           ("main",), can_ready, hint=7),
    Action("cancel", ("x",), "cancel", "Cancel what is running; what it has measured is kept.",
           ("main", "origin", "experiments", "census"), can_cancel, hint=8),
    Action("ask_cancel", ("escape",), "cancel", "Ask whether to cancel what is running; ctrl+c asks on every "
           "screen.", ("main",), can_cancel),
    Action("report", ("e",), "report", "Write the report (Markdown, HTML and JSON) into the session's "
           "folder.", (*RESULTS, "log", "commands"), can_report, hint=6),
    Action("log", ("l",), "log", "The server's log.", RESULTS, can_session,
           hint=9),
    Action("commands", ("at",), "commands", "Every call and process of this session, ready to copy.",
           (*RESULTS, "log"), can_session, hint=12),
    Action("follow", ("f",), "follow", "Follow the end of the log, or stay where you are.", ("log",), hint=2),
    Action("search", ("slash",), "search", "Search the log for a text (re: before a regular expression); "
           "» marks the lines.", ("log",), hint=4),
    Action("next_match", ("n",), "next match", "Go to the next line that holds it.", ("log",), hint=5),
    Action("previous_match", ("N",), "previous match", "Go to the line before that holds it.", ("log",)),
    Action("next_error", ("exclamation_mark",), "next error", "Go to the next line of the log that speaks of "
           "an error.", ("log",), hint=3),
    Action("read_on", ("greater_than_sign",), "read on", "Scroll the text beside the table; its border says "
           "how much there is.", READING),
    Action("read_back", ("less_than_sign",), "read back", "Scroll that text back.", READING),
    Action("pane_1", ("1",), "pane 1", "Go to the first pane.", ("start", "main")),
    Action("pane_2", ("2",), "pane 2", "Go to the second pane.", ("start", "main")),
    Action("pane_3", ("3",), "pane 3", "Go to the third pane; on the main screen the tokens.",
           ("start", "main")),
    Action("pane_4", ("4",), "pane 4", "Go to the fourth pane; on the main screen the log.",
           ("start", "main")),
    Action("zoom", ("z",), "zoom", "Give the whole window to the pane with the focus, or back.",
           ("main", "origin"), hint=11),
    Action("control", ("C",), "take control", "Command this session from this terminal, which only watches "
           "while another has control.", WORK, can_control, hint=2),
    Action("pause", ("F",), "pause", "Freeze tables and log while the work goes on, or show all that came "
           "meanwhile; what you send to the runner ends the pause.", WORK, can_pause),
    Action("open_in", ("V",), "in another program", "Open the server's log, the command log, a call's body "
           "or the report in $PAGER, or $VISUAL/$EDITOR, with control characters of servers spelled out.",
           WORK, can_open_in),
    Action("theme", ("T",), "theme", "Change between the dark and the light theme.", ALL),
    Action("compact", ("D",), "compact", "Show more rows: no lower borders, one statement, one line of the "
           "guide; or all as before.", ALL),
    Action("end_tour", ("ctrl+t",), "end the tour", "Go on alone; the start screen begins it anew.", WORK,
           lambda s: True if s.touring else "no tour is under way"),
    Action("picture", ("f12",), "picture", "Write this screen as an SVG beside the session.", ALL),
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
    Action("choose", ("enter",), "open", "Open what the row under the cursor leads to, else all its cells.",
           TABLE),
    Action("map_up", ("up", "k"), "layer before", "To the layer above; the border below says what is under "
           "the cursor.", ("map",)),
    Action("map_down", ("down", "j"), "next layer", "To the layer below.", ("map",)),
    Action("map_left", ("left",), "earlier rows", "To the column on the left.", ("map",)),
    Action("map_right", ("right",), "later rows", "To the column on the right.", ("map",)),
    Action("copy_screen", ("y",), "copy screen", "Copy the lines on the screen; says which way they went.",
           ("lines",)),
    Action("copy_log", ("Y",), "copy all", "Copy the log, as far back as it is kept here.", ("lines",)),
    Action("filter", ("slash",), "filter", "Show only rows that pass a filter: kl>1e-3 pos:97..120 "
           "tok:\"the\" -note:first, or a word.", TABLE, hint=20),
    Action("copy_row", ("y",), "copy row", "Copy the row under the cursor; says which way it went.", TABLE,
           hint=22),
    Action("copy_cell", ("i",), "cells", "All cells of the row under the cursor in full, to copy one of "
           "them.", TABLE),
    Action("copy_rows", ("Y",), "copy table", "Copy all shown rows, with tabs between the columns.", TABLE),
    Action("sort_next", ("s",), "sort", "Sort by the next column.", TABLE, hint=21),
    Action("sort_reverse", ("S",), "reverse", "Turn the sort order around.", TABLE),
)  # fmt: skip

__all__ = [
    "ACTIONS", "BY_ID", "Action", "Answer", "Situation", "bindings", "hints", "key_now", "key_of",
    "name_of_character", "of_screen", "rebind", "rebound", "shown",
]  # fmt: skip

BY_ID = {action.id: action for action in ACTIONS}


def of_screen(screen: str) -> list[Action]:
    """The actions of a screen, in the order of the registry."""
    return [action for action in ACTIONS if screen in action.screens]


def hints(screen: str) -> list[Action]:
    """Those of its footer, most important first."""
    return sorted((a for a in of_screen(screen) if a.hint), key=lambda action: action.hint)


def rebind(keys: Mapping[str, tuple[str, ...]]) -> None:
    """From now on these actions have these keys (keymap.py has checked them), and all others their own."""
    _REBOUND.clear()
    _REBOUND.update(keys)


def rebound() -> dict[str, str]:
    """Textual's keymap of what the configuration says: ids of bindings and their keys."""
    return {
        f"{screen}.{name}": ",".join(_with_aliases(keys))
        for name, keys in _REBOUND.items()
        for screen in BY_ID[name].screens
    }


def key_of(action: str) -> str:
    """The key of an action, as a sentence has it."""
    return BY_ID[action].shown_key


def key_now(key: str, screen: str = "main") -> str:
    """The key that does now what `key` does on this screen by default: the core knows only those."""
    action = by_default(key, screen)
    return key if action is None else action.shown_key


def by_default(key: str, screen: str = "main") -> Action | None:
    """The action that has this key on the screen where nothing gives it another one."""
    return next((one for one in of_screen(screen) if shown(one.default_keys[0]) == key), None)


def _with_aliases(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return, typed before the terminal was taken over, arrives as a line feed."""
    return (*keys, "ctrl+j") if "enter" in keys else keys


def bindings(screen: str) -> list[BindingType]:
    """Textual's bindings for a screen, or for a widget (`table`) that has action methods of its own."""
    from textual.binding import Binding  # the manual reads the registry without the workbench

    own = screen in WIDGETS
    return [
        Binding(
            ",".join(_with_aliases(action.default_keys)),
            action.id if own else f"do({action.id!r})",
            action.label,
            show=False,
            id=f"{screen}.{action.id}",
            tooltip=action.help,
        )
        for action in of_screen(screen)
    ]
